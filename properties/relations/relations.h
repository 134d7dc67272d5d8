// Metamorphic relations: two cases that differ in something irrelevant to a request answer it with
// the same tokens. The right tokens are not needed: the two must agree.
//
// Invariants
// (1) In the answering model every token is a hash of what it read (reading_model.h), so a wrong
//     block anywhere before a token changes it.
// (2) If a request ends early in one of the two (its client disconnects, the run ends), the tokens
//     that both have are compared.
//
// Not related: the content of states. The engine does NOT guarantee that more memory never makes a
// request finish later (tests/regressions/more_memory_finishes_later.case.jsonl).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "base/result.h"
#include "properties/generate/generator.h"
#include "properties/relations/reading_model.h"
#include "properties/shrink/case_parts.h"
#include "traces/formats/saved_case.h"

namespace lockstep {

struct Relation {
  std::string_view name;
  std::string_view says;
  // The other case; nothing: the change is none here, or the engine would not take it.
  std::optional<SavedCase> (*change)(const SavedCase& saved);
  bool moves_nothing = false;    // every byte of the cache is where it was
  bool of_connectors = false;    // applies to cases with a KV connector only
  std::string_view mutant = {};  // of a backend, under which it breaks
};
// Of what a scheduler decides.
std::span<const Relation> relations();
// Of where a backend keeps it: layouts, pages, kernel blocks, streams.
std::span<const Relation> place_relations();

// What generated cases are held to relations without: priorities, since what such a request hits
// may never have been computed (finding 3 of docs/findings.md); windows that are computed again,
// whose tokens see less the second time; sinks, whose blocks have fixed ids; groups of host pages,
// whose block ids are of two pools; faults; and ranks, which relations bring themselves.
constexpr FeatureSet unrelated_features() {
  FeatureSet features = kRankFeatures;
  features.add({Feature::priority_policy, Feature::faults, Feature::bounded_replay, Feature::sinks,
                kHostPages});
  return features;
}

struct Breach {
  std::string request;
  std::int64_t index = 0;  // of the first output token that differs
  std::string what;        // one line
};

// Nothing: it holds, or it does not apply. Errors: a case that the engine refuses.
// `decisions`: of another engine; absent: the model's. REQUIRES: why_not_answered(saved) is empty.
Result<std::optional<Breach>> check_relation(const SavedCase& saved, const Relation& relation,
                                             const DecisionsFactory& decisions = {});
// The first token that two runs answer differently.
std::optional<Breach> first_breach(const SavedCase& saved, const Answers& one,
                                   const Answers& other);

// Nothing: the change is none here, or the engine would not take it.
using Changed = std::optional<SavedCase>;

// The case with a change, if it is one and breaks no rule of the engine that held before.
template <class Change>
Changed changed(const SavedCase& saved, const Change& change) {
  SavedCase other = saved;
  change(other);
  const bool sound = (broken_rules(other) & ~broken_rules(saved)) == 0;
  return other == saved || !sound ? std::nullopt : Changed(std::move(other));
}

// Block ids are names: a pool that allocates them in another order decides the same, name for name.
//
// Invariants
// (1) Every recorded field is compared, step by step: scheduled requests and tokens, their blocks,
//     hits, evictions, zeroing.
// (2) The two runs' blocks correspond by their position in the first free queue, permanently:
//     eviction order depends on when blocks were freed, never on their numbers.
//
// Left out: the order of the zero list, which vllm-0.33.0 takes from a set of ids.
//
// Absent: the decisions are the same. Errors: what the engine refuses.
Result<std::optional<Breach>> check_shuffled_blocks(const SavedCase& saved);

}  // namespace lockstep
