// Relations checked on backends: two cases that differ in something irrelevant to a request make
// attention read the same, position by position.
//
// Invariants
// (1) A change that moves nothing also leaves every page unchanged after every step, states
//     included.
// (2) Over context parallel ranks, attention over a request is a mean of the ranks' own results,
//     with one weight per head. That is the form of a combination by softmax sums, whatever the
//     sums are.
//
// Not checked: (2) for more than two ranks, and whether the weight is right. Kernel tests combine
// with sums.
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

// What attention on a backend reads for each request. A case runs on real backends and is read
// position by position, so that two runs can be compared without a model.
//
// Invariants
// (1) The content at a place (request, layer, positions) depends only on the request's tokens:
//     every run that reads the place reads the same, whatever else differs between the runs.
// (2) The tokens that a step writes are read one by one, and together with everything that they
//     attend to. Drafts are not read, because they depend on when they were proposed.
// (3) A reading ends with its run, the step of the first divergence included.
// (4) Under context parallelism a rank renumbers the rows that it keeps, so digests are not read.
//     Outputs are, of every rank over its own share.
//
// Not read: states, which attention does not read. `pages` covers them where a change moves
// nothing.
struct ReadPlace {
  std::string request;
  // Index in the plan's order.
  std::int32_t layer = 0;
  std::int32_t first = 0;  // positions [first, last)
  std::int32_t last = 0;
  auto operator<=>(const ReadPlace&) const = default;
};

// The results of attention to one place, one per rank.
struct ReadOutputs {
  std::int64_t head_size = 0;
  std::vector<std::vector<float>> of_ranks;  // [rank][head * head_size]; empty: has none of it
  // True: tokens are sharded over the ranks; false: replicated.
  bool is_dealt_out = true;
};

// What one run read. Places that only one of two runs reads are not compared.
struct BackendReading {
  std::map<ReadPlace, std::uint64_t> digests;
  std::map<ReadPlace, ReadOutputs> outputs;
  std::vector<Fingerprint> pages;  // one per step: all pages, mixed; empty unless requested
  // A place that was read twice with different results.
  std::optional<ReadPlace> unlike_itself;
  // True if the run diverged from the model
  bool diverged = false;
};

// Runs the case and reads it. `with_pages`: fingerprints the whole pool after every step. Errors:
// the engine or the backend refuses the case. REQUIRES: why_not_read(saved) is empty.
Result<BackendReading> read_on_backend(const SavedCase& saved, const BackendFactory& make_backend,
                                       bool with_pages);
// Returns why the case has no steps that can be read; empty: it can be read.
std::string why_not_read(const SavedCase& saved);

struct BackendCheck {
  std::string refused;        // why the backend refuses the other case; empty: it does not
  std::int64_t compared = 0;  // places that both runs read; digests and outputs count separately
  std::int64_t pages = 0;     // steps after which all pages were compared
  std::optional<Breach> breach;
};

// Checks a relation on a backend. Nothing: it does not apply. Errors: the engine or the backend
// refuses `saved`. REQUIRES: why_not_read(saved) is empty.
Result<std::optional<BackendCheck>> check_on_backend(const SavedCase& saved,
                                                     const Relation& relation,
                                                     const BackendFactory& make_backend);

}  // namespace lockstep
