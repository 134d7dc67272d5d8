// Relations checked on backends: two cases that differ in something irrelevant to a request make
// attention read the same, position by position.
//
// Invariants
// (1) A change that moves nothing also leaves every page unchanged, after every step, states
//     included.
// (2) Over context parallel ranks, attention over a request is a mean of the ranks' own, with one
//     weight per head: the form of a combination by their softmax sums, whatever the sums are.
//
// Not checked: (2) for more than two ranks, and whether the weight is right (kernel tests combine
// with sums).
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "properties/judge/judge.h"
#include "properties/relations/relations.h"
#include "traces/formats/saved_case.h"

namespace lockstep {

// What attention on a backend reads for each request: a case run on real backends and read position
// by position, so that two runs can be compared without a model.
//
// Invariants
// (1) The content at a place (request, layer, positions) depends on the request's tokens only:
//     every run that reads it reads the same, whatever else differs between the runs.
// (2) The tokens that a step writes are read one by one, and together with everything they attend
//     to. Drafts are not read: they depend on when they were proposed.
// (3) A reading ends with its run, the step of the first divergence included.
// (4) Under context parallelism a rank renumbers what it keeps, so digests are not read; outputs
//     are, of every rank over its own share.
//
// Not read: states, which attention does not read. `pages` covers them where a change moves
// nothing.
struct ReadPlace {
  std::string request;
  std::int32_t layer = 0;
  std::int32_t first = 0;  // positions [first, last)
  std::int32_t last = 0;
  auto operator<=>(const ReadPlace&) const = default;
};

struct ReadOutputs {
  std::int64_t head_size = 0;
  std::vector<std::vector<float>> of_ranks;  // [rank][head * head_size]; empty: keeps nothing of it
  bool is_dealt_out = true;                  // the tokens, over the ranks; otherwise each has all
};

struct BackendReading {
  std::map<ReadPlace, std::uint64_t> digests;
  std::map<ReadPlace, ReadOutputs> outputs;
  std::vector<Fingerprint> pages;  // of all pages, mixed, a step; only if asked for
  // A place that was read twice, and not the same.
  std::optional<ReadPlace> unlike_itself;
  bool diverged = false;
};

// Errors: what the engine or the backend refuse. `with_pages`: fingerprints too.
Result<BackendReading> read_on_backend(const SavedCase& saved, const BackendFactory& make_backend,
                                       bool with_pages);
// Why the case has no steps that a backend could execute; empty: it has.
std::string why_not_read(const SavedCase& saved);

struct BackendCheck {
  std::string refused;        // why the backend does not take the other case; empty: it does
  std::int64_t compared = 0;  // places that both runs read, digests and outputs
  std::int64_t pages = 0;     // steps after which all pages were compared
  std::optional<Breach> breach;
};

// Nothing: the relation does not apply. Errors: what the engine or the backend refuses of `saved`.
// REQUIRES: why_not_read(saved) is empty.
Result<std::optional<BackendCheck>> check_on_backend(const SavedCase& saved,
                                                     const Relation& relation,
                                                     const BackendFactory& make_backend);

}  // namespace lockstep
