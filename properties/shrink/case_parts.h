// The parts that can be taken out of a saved case, and the case without them: records of the trace
// or of the recording, groups and layers of the plan. And a recording as a case.
//
// (1) What is left is whole: requests name no removed one in `after`, times never decrease, tensors
//     hold the layers that are there, and the pages of all groups are equally large.
// (2) The case that is given is not changed.
//
// Not looked after here: whether the run still fails, and whether an engine takes the options.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/result.h"
#include "traces/formats/recording.h"
#include "traces/formats/run_fields.h"
#include "traces/formats/saved_case.h"

namespace lockstep {

// A request or a control; in a recording a request with all its entries.
std::size_t num_records(const SavedCase& saved);
// keep[i]: record i stays. REQUIRES: one entry a record.
SavedCase with_records(const SavedCase& saved, const std::vector<bool>& keep);

// The requests of the trace or of the recording, in order; the pointers are into `saved`.
std::vector<RequestSpec*> requests_of(SavedCase& saved);
std::vector<const RequestSpec*> requests_of(const SavedCase& saved);
// The same of a trace alone, with outputs and aborts; empty for a recording.
std::vector<TraceRequest*> trace_requests_of(SavedCase& saved);

// Takes the tokens out of the prompt that no literal run points to, after runs were cut.
void drop_unused_tokens(Prompt& prompt);

SavedCase without_group(const SavedCase& saved, std::size_t group);
SavedCase without_layer(const SavedCase& saved, std::size_t group, std::size_t layer);

// Layers that keep a state instead of keys and values.
bool has_states(const SavedCase& saved);
bool has_connector(const SavedCase& saved);
// Loads of its connector may leave blocks unfilled.
bool may_lose_blocks(const SavedCase& saved);

// Changes every spec of a group in the same way: the group's own and those of its layers.
void change_specs(SavedCase& saved, std::size_t group,
                  const std::function<void(KVCacheSpec&)>& change);

// Prefills are cut where a state is kept.
void without_checkpoints(SavedCase& saved);

// Tensors for the groups as they are: pages padded to the largest and not beyond. False: a group
// packs several layers into a page, or a page is too large to count, and nothing was changed.
bool plan_again(SavedCase& saved);
// Another number of blocks in the same plan. False: a tensor is not a whole number of pages, and
// nothing was changed.
bool set_num_blocks(SavedCase& saved, std::int64_t num_blocks);

// Configurations that an engine refuses to start with, or that are useless: a shrink that reached
// one would end in a failure that no engine can have.
//
// Invariants
// (1) A rule that the first case of a shrink breaks itself does not apply to the others.
//
// Not checked: what the reader refuses, and what the planner does with memory.
//
// One bit for each rule that the case breaks:
//   a step has a token for every running request, and without chunks for the longest one
//   the limit on long prefills is not above max_model_len
//   the pool holds a request of max_model_len, and no request of the case is longer
//   drafts have a method and a method has drafts; state groups keep a block for each draft
//   all state groups have the mode of the engine; prefix caching has a mode that saves states, and
//   a mode that saves states has prefix caching
//   with states in mode align a step reaches the next block, and prompts come in chunks
//   a window and a chunk are tokens; no other kind has them
using BrokenRules = std::uint32_t;
BrokenRules broken_rules(const SavedCase& saved);

// A recording as a saved case without a backend: its configuration, and its events and samples step
// by step. The profile of the recorded engine makes the decisions again, or the recorded ones are
// followed.
// Errors: a recording with a KV connector where the model decides, groups without a possible plan.
Result<SavedCase> case_of(std::string name, Recording recording, Decides decide = Decides::model);

// The requests of a recorded case on a clock on which a step takes as long as a recorded one.
// Errors: as trace_of() of traces/formats/recording.h. REQUIRES: it has a recording.
Result<SavedCase> on_a_clock(const SavedCase& saved);

// How large a saved case is, as numbers to show and as an order to shrink by.
//
// (1) Of two cases the smaller rank is the simpler case to read; equal cases have equal ranks.
// (2) Every rank is a tuple of numbers that are not negative: a search that only goes down ends.

struct CaseSize {
  std::int64_t requests = 0;
  std::int64_t tokens = 0;  // of prompts and planned outputs
  std::int64_t groups = 0;
  std::int64_t layers = 0;
  std::int64_t blocks = 0;
  std::int64_t options = 0;  // that are not the simplest there is
  bool operator==(const CaseSize&) const = default;
};
CaseSize size_of(const SavedCase& saved);

// The most telling number first: requests, groups, layers, steps up to the failure, tokens, and so
// on down to the names of requests.
using CaseRank = std::array<std::int64_t, 14>;
// Where `steps` stands.
inline constexpr std::size_t kRankOfSteps = 4;
CaseRank rank_of(const SavedCase& saved, std::int64_t steps);

// An option that counts, in CaseSize::options, while its value is not the simplest. Limits and
// sizes do not, nor what the engine is called: a failure is one of that engine.
bool counts_as_set(const RunField& field);

}  // namespace lockstep
