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

// What an update of real numbers starts from and overwrites: rule (15). Words of a state are null
// where it starts from zeros, or from what another update of the same step leaves.
struct StateBefore {
  StateWords source;
  StateWords conv_source;
  std::vector<std::uint64_t> target;
};

struct StepExpectation {
  // Per group num_padded_tokens slots, of rows of encoders as many as are written; empty for state
  // groups, which have none.
  std::vector<std::vector<Slot>> slot_mappings;
  std::vector<StateBefore> states_before;  // per state update; empty: states are words
};

class ModelStep {
 public:
  ModelStep(const KVCacheConfig& plan, MemoryModel& model, Worker& worker);

  // A finding when the program writes or reads a state where it must not: the decision was wrong.
  // `requests` are those of program.rows.
  Checked apply(const StepProgram& program, std::span<const RequestId> requests,
                StepExpectation& expected);

 private:
  Checked apply_blocks(const StepProgram& program);
  Checked write_tokens(const StepProgram& program, const RowSlice& slice, RequestId id,
                       std::int32_t group, std::vector<Slot>& slots);
  Checked write_encoder_rows(const StepProgram& program, std::span<const RequestId> requests,
                             std::int32_t group, std::vector<Slot>& slots);
  Checked write_token(const StepProgram& program, const WorkerRequest& request, std::int32_t group,
                      std::int64_t position, ContentId now, Slot& slot);
  Checked advance_states(const StepProgram& program, std::span<const RequestId> requests,
                         StepExpectation& expected);
  StateBefore state_before(const StateUpdate& update) const;

  const KVCacheConfig& plan_;
  const std::int64_t num_replayed_;  // tokens
  MemoryModel& model_;
  Worker& worker_;
};

// The positions that the tokens [first, last) of a request may attend to: [lowest, last).
std::int64_t first_attended(const KVCacheSpec& spec, std::int64_t first);
// First position of the request that a step starting at `first` may read in a layer of this kind. A
// recomputed window holds nothing before the admitted tokens, nor does a ring, which keeps as many
// tokens as it has rows.
std::int64_t first_readable(const KVCacheSpec& spec, const WorkerRequest& request,
                            std::int64_t first);

// The range that a step reads of a request in a layer, in that layer's positions: rows of its
// encoder, or its tokens after the sinks.
struct Reach {
  std::int64_t lowest = 0;
  std::int64_t first = 0;  // from here on the step has written them
  std::int64_t last = 0;
  std::int64_t gap_first = 0, gap_last = 0;  // not read in between: rule (23)
};
// ... from the slice's first token on, or, `of_last`, from its last one alone.
Reach reach_in(const KVCacheSpec& spec, const WorkerRequest& request, const RowSlice& slice,
               bool is_encoded, bool of_last = false);
// The contents that those positions have.
const PrefixContent& contents_in(const KVCacheSpec& spec, const WorkerRequest& request);

// Tokens after the start of a hit that a plan with recomputed windows computes again; 0: no such
// windows.
std::int64_t replayed_tokens(const KVCacheConfig& plan);

// Where the token at a position of its request lies: in which entry of the block table, where in
// that block. REQUIRES: the rank keeps it.
struct TokenPlace {
  std::int64_t entry = 0;
  std::int64_t offset = 0;
};
TokenPlace place_of_token(const MemoryModel& model, const Worker& worker, std::int32_t group,
                          std::int64_t position);

// Checks that every row that the request's next tokens (from `first`) read holds the content of its
// own prefix. Called when a request with computed tokens is admitted: finds a wrong hit.
Checked check_hit(const MemoryModel& model, const Worker& worker, const WorkerRequest& request,
                  const KVCacheConfig& plan, std::int64_t step, std::int64_t first);

}  // namespace lockstep
