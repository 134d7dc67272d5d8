// Metamorphic relations: two cases that differ in something irrelevant to a request must answer it
// with the same tokens. The right tokens are not needed: the two must agree.
//
// Invariants
// (1) In the answering model every token is a hash of what it read (reading_model.h). A wrong block
//     anywhere before a token therefore changes it.
// (2) If a request ends early in one of the two runs (its client disconnects, the run ends), the
//     tokens that both have are compared.
// (3) The changed case breaks no rule of the engine that the given case keeps.
//
// Not related: the contents of states. Engines do NOT guarantee that more memory never makes a
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

// A relation: what to change, and what must not change with it.
struct Relation {
  std::string_view name;
  std::string_view says;
  // Returns the other case. Nothing: the change has no effect on this case, or the engine would
  // refuse it.
  std::optional<SavedCase> (*change)(const SavedCase& saved);
  bool moves_nothing = false;    // true: every byte of the cache keeps its position
  bool of_connectors = false;    // true: applies only to cases with a KV connector
  std::string_view mutant = {};  // a backend's mutant that breaks it; empty: none
};
// Returns the relations about decisions.
std::span<const Relation> relations();
// Returns the relations about positions in memory: layouts, pages, kernel blocks, streams.
std::span<const Relation> place_relations();

// Returns the features that generated cases exclude when relations are checked: priorities, because
// a hit may find blocks that were never computed (docs/findings.md, 3); windows that are
// recomputed, because their tokens see less the second time; sinks, because their blocks have fixed
// ids; host pages, because their block ids belong to two pools; faults; and ranks, which relations
// add themselves.
constexpr FeatureSet unrelated_features() {
  FeatureSet features = kRankFeatures;
  features.add({Feature::priority_policy, Feature::faults, Feature::bounded_replay, Feature::sinks,
                kHostPages});
  return features;
}

// The first place where a relation does not hold.
struct Breach {
  // Empty: of pages or of a step.
  std::string request;
  std::int64_t index = 0;  // first output token, position or step that differs
  std::string what;        // one line
};

// Checks a relation on decisions. Nothing: it holds, or it does not apply. `decisions`: another
// engine's; absent: the model's. Errors: the engine refuses one of the cases, or fails. REQUIRES:
// why_not_answered(saved) is empty.
Result<std::optional<Breach>> check_relation(const SavedCase& saved, const Relation& relation,
                                             const DecisionsFactory& decisions = {});
// Returns the first token that two runs answer differently, in the order of the case's requests.
// Requests that only one run answers are skipped.
std::optional<Breach> first_breach(const SavedCase& saved, const Answers& one,
                                   const Answers& other);

// Nothing: the change has no effect, or the engine would refuse it.
using Changed = std::optional<SavedCase>;

// Returns the case with the change, unless the change has no effect or breaks a rule of the engine
// that `saved` keeps.
template <class Change>
Changed changed(const SavedCase& saved, const Change& change) {
  SavedCase other = saved;
  change(other);
  const bool sound = (broken_rules(other) & ~broken_rules(saved)) == 0;
  return other == saved || !sound ? std::nullopt : Changed(std::move(other));
}

// Checks that block ids are names: a pool that allocates them in another order must decide the
// same, name for name.
//
// Invariants
// (1) Every recorded field is compared, step by step: scheduled requests and tokens, their blocks,
//     hits, evictions, zeroing.
// (2) The blocks of the two runs correspond by their position in the first free queue, for the
//     whole run: the order of evictions depends on when blocks were freed, never on their numbers.
//
// Left out: the order of the zero list, which vllm-0.33.0 takes from a set of ids.
//
// Nothing: the decisions are the same. Errors: the engine refuses the case.
Result<std::optional<Breach>> check_shuffled_blocks(const SavedCase& saved);

}  // namespace lockstep
