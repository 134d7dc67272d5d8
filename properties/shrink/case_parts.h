// The parts that can be removed from a saved case, and the case without them: records of the trace
// or of the recording, groups and layers of the plan. Also a recording as a case, and the size of a
// case.
//
// Invariants
// (1) The remaining case is consistent: no request waits in `after` for a removed one, times never
//     decrease, tensors hold the layers that exist, and the pages of all groups have equal size.
// (2) The given case is not changed.
//
// Not checked: whether the run still fails, and whether an engine accepts the options.
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

// Returns the number of records: requests and controls of a trace; in a recording, all events
// except aborts, which belong to the addition of their request.
std::size_t num_records(const SavedCase& saved);
// Returns the case with the records i for which keep[i]. In a recording, the removed requests also
// disappear from the decisions of every step. REQUIRES: keep.size() == num_records(saved).
SavedCase with_records(const SavedCase& saved, const std::vector<bool>& keep);

// Returns the requests of the trace or of the recording, in order. The pointers point into `saved`.
std::vector<RequestSpec*> requests_of(SavedCase& saved);
std::vector<const RequestSpec*> requests_of(const SavedCase& saved);
// Returns the same for a trace, with outputs and aborts; empty for a recording.
std::vector<TraceRequest*> trace_requests_of(SavedCase& saved);

// Removes the tokens of a prompt that no literal run uses, after runs were cut.
void drop_unused_tokens(Prompt& prompt);

// Returns the case without a group or a layer, and without tensors that become empty. The pages are
// not planned again. A group may be left without layers. REQUIRES: the indexes exist.
SavedCase without_group(const SavedCase& saved, std::size_t group);
SavedCase without_layer(const SavedCase& saved, std::size_t group, std::size_t layer);

bool has_connector(const SavedCase& saved);
// Returns true if loads of the case's connector may leave blocks unfilled. Unless the case states a
// percentage, only loads from peers fail. With several groups no lost block is reported.
bool may_lose_blocks(const SavedCase& saved);

// Applies `change` to every spec of a group: the group's own and those of its layers.
void change_specs(SavedCase& saved, std::size_t group,
                  const std::function<void(KVCacheSpec&)>& change);

// Removes prefill checkpoints, so that prefills end at the boundaries where a state is saved.
void without_checkpoints(SavedCase& saved);

// Plans tensors for the groups as they are, with pages padded to the largest and not beyond. False:
// a group packs several layers into a page, or a page is too large to count. The case is then
// unchanged.
bool plan_again(SavedCase& saved);
// Sets another number of blocks in the same plan. False: a tensor is not a whole number of pages,
// or a number is below 1. The case is then unchanged.
bool set_num_blocks(SavedCase& saved, std::int64_t num_blocks);

// Configurations with which an engine refuses to start, or that are useless: a shrink that reached
// one would end in a failure that no engine can have.
//
// Invariants
// (1) A rule that the first case of a shrink breaks does not apply to later ones.
//
// Not checked: what the reader refuses, and what the planner does with memory.
//
// One bit per rule that the case breaks, from the lowest:
//   0  a step has a token per running request and, without chunks, one per token of max_model_len
//   1  the threshold of long prefills is not above max_model_len
//   2  the pool holds a request of max_model_len
//   3  no request of the case is longer than that
//   4  drafts have a method and a method has drafts; state groups keep a block per draft
//   5  state groups have the engine's mode; it saves states exactly with prefix caching
//   6  in mode align every group's block fits a step, and prompts come in chunks
//   7  a window has more than one token, a chunk at least one
//   8  state groups have blocks of one size
//   9  a page of states is whole elements of each state
using BrokenRules = std::uint32_t;
BrokenRules broken_rules(const SavedCase& saved);

// Makes a saved case of a recording, without a backend: its configuration, and its events and
// samples step by step. The profile of the recorded engine makes the decisions again
// (Decides::model), or the recorded ones are followed. Errors: a recording with a KV connector
// where the model decides; groups without a possible plan.
Result<SavedCase> case_of(std::string name, Recording recording, Decides decide = Decides::model);

// Returns the case with its recorded requests as a trace, on a clock on which every step takes 10
// ms. Errors: as trace_of() in traces/formats/recording.h. REQUIRES: the case has a recording.
Result<SavedCase> on_a_clock(const SavedCase& saved);

// The size of a saved case, as numbers to show and as an order to shrink by.
//
// Invariants
// (1) Of two cases the one with the smaller rank is simpler to read. Equal cases have equal ranks.
// (2) A rank is a tuple of numbers >= 0, so a search that only descends ends.

struct CaseSize {
  std::int64_t requests = 0;
  std::int64_t tokens = 0;  // tokens of prompts and planned outputs
  std::int64_t groups = 0;
  std::int64_t layers = 0;
  // Null block included.
  std::int64_t blocks = 0;
  std::int64_t options = 0;  // options that do not have their simplest value
  bool operator==(const CaseSize&) const = default;
};
CaseSize size_of(const SavedCase& saved);

// The criteria in order of weight: entries of a recording; records, faults and mutants; groups;
// layers; steps up to the failure; tokens; runs and properties of requests; options; elements;
// blocks; tokens of blocks and windows; limits and ranks; arrivals; names and numbers.
using CaseRank = std::array<std::int64_t, 14>;
// Index of the steps in a rank. They are known only after a run.
inline constexpr std::size_t kRankOfSteps = 4;
CaseRank rank_of(const SavedCase& saved, std::int64_t steps);

// Returns true if an option counts in CaseSize::options while it does not have its simplest value.
// Limits and sizes do not count, nor does the name of the engine: a failure belongs to that engine.
bool counts_as_set(const RunField& field);

}  // namespace lockstep
