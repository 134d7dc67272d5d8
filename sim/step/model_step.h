// Applies a program to the memory model, and derives what the backend should show afterwards.
//
// Invariants
// (1) Slots are the reference's own arithmetic on the worker's tables, never a backend's result.
// (2) Operations follow the order of StepProgram's members: rule (9) of sim/protocol/backend.h.
// (3) A program that cannot be applied is a finding, and the model's memory then is undefined.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "reference/memory/memory_model.h"
#include "sim/step/worker.h"
#include "sim/verdict/divergence.h"

namespace lockstep {

// Input of an update of real numbers, and the content it overwrites: rule (15). Words of a state
// are null if it starts from zeros, or from the result of another update of the same step.
struct StateBefore {
  StateWords source;
  StateWords conv_source;
  std::vector<std::uint64_t> target;
};

struct StepExpectation {
  // Per group: num_padded_tokens slots; for encoder groups, one slot per written row; empty for
  // state groups.
  std::vector<std::vector<Slot>> slot_mappings;
  std::vector<StateBefore> states_before;  // per state update; empty: states are words
};

class ModelStep {
 public:
  ModelStep(const KVCacheConfig& plan, MemoryModel& model, Worker& worker);

  // Applies the program. Returns a divergence if it writes or reads a state where it must not,
  // since the decision was wrong then. `requests` are those of program.rows.
  Checked apply(const StepProgram& program, std::span<const RequestId> requests,
                StepExpectation& expected);

 private:
  // Copies, poison, zeroing and loads: everything before the tokens are written.
  Checked apply_blocks(const StepProgram& program);
  Checked write_tokens(const StepProgram& program, const RowSlice& slice, RequestId id,
                       std::int32_t group, std::vector<Slot>& slots);
  Checked write_encoder_rows(const StepProgram& program, std::span<const RequestId> requests,
                             std::int32_t group, std::vector<Slot>& slots);
  // Writes one token and sets its slot. Returns a divergence if the slot is another request's.
  Checked write_token(const StepProgram& program, const WorkerRequest& request, std::int32_t group,
                      std::int64_t position, ContentId now, Slot& slot);
  Checked advance_states(const StepProgram& program, std::span<const RequestId> requests,
                         StepExpectation& expected);
  // Returns the words that an update starts from and overwrites.
  StateBefore state_before(const StateUpdate& update) const;

  const KVCacheConfig& plan_;
  const std::int64_t num_replayed_;  // tokens
  MemoryModel& model_;
  Worker& worker_;
};

// Returns the lowest position that the token at `first` attends to. A window of w tokens includes
// the token itself: window 32, first 100: 69. A chunk starts at a multiple of its size.
std::int64_t first_attended(const KVCacheSpec& spec, std::int64_t first);
// Returns the first position of the request that a step starting at `first` may read in a layer of
// this kind. A recomputed window holds nothing before the admitted tokens. A ring holds as many
// tokens as it has rows.
std::int64_t first_readable(const KVCacheSpec& spec, const WorkerRequest& request,
                            std::int64_t first);

// The range that a step reads of a request in a layer, in that layer's positions: rows of its
// encoder, or its tokens after the sinks. Positions are lowest <= first <= last.
struct Reach {
  std::int64_t lowest = 0;
  std::int64_t first = 0;  // first one that the step writes
  std::int64_t last = 0;
  std::int64_t gap_first = 0, gap_last = 0;  // not read: rule (23)
};
// Returns the reach of the slice's tokens, or with `of_last` that of its last token only.
// `is_encoded`: the step writes the encoder's rows.
Reach reach_in(const KVCacheSpec& spec, const WorkerRequest& request, const RowSlice& slice,
               bool is_encoded, bool of_last = false);
// Returns the contents at those positions.
const PrefixContent& contents_in(const KVCacheSpec& spec, const WorkerRequest& request);

// Returns the number of tokens after the start of a hit that a plan with recomputed windows
// computes again; 0: no such windows.
std::int64_t replayed_tokens(const KVCacheConfig& plan);

// Position of a token in its request's table: the entry, and the slot in that block.
struct TokenPlace {
  std::int64_t entry = 0;
  std::int64_t offset = 0;
};
// REQUIRES: this rank keeps the token.
TokenPlace place_of_token(const MemoryModel& model, const Worker& worker, std::int32_t group,
                          std::int64_t position);

// Checks that every row that the request's next tokens (from `first`) read holds the content of its
// own prefix. Called at the admission of a request with computed tokens, this finds a wrong hit
// before any attention result depends on it.
Checked check_hit(const MemoryModel& model, const Worker& worker, const WorkerRequest& request,
                  const KVCacheConfig& plan, std::int64_t step, std::int64_t first);

}  // namespace lockstep
