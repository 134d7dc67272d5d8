// A program carried out on the memory model, and what the backend should show afterwards. The slots
// are the reference's own arithmetic on the worker's tables, never what a backend computed.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "reference/memory/memory_model.h"
#include "sim/protocol/backend.h"
#include "sim/step/worker.h"
#include "sim/verdict/checked.h"

namespace lockstep {

// What an update of real numbers starts from and overwrites: rule (15). Words of a state are null
// where it starts from zeros, or from what another update of the same step leaves.
struct StateBefore {
  StateWords source;
  StateWords conv_source;
  std::vector<std::uint64_t> target;
};

struct StepExpectation {
  // Per group num_padded_tokens slots; empty for state groups, which have none.
  std::vector<std::vector<Slot>> slot_mappings;
  std::vector<StateBefore> states_before;  // per state update; empty: states are words
};

class ModelStep {
 public:
  ModelStep(MemoryModel& model, Worker& worker) : model_(model), worker_(worker) {}

  // A finding when the program writes or reads a state where it must not: the decision was wrong.
  // `requests` are those of program.rows.
  Checked apply(const StepProgram& program, std::span<const RequestId> requests,
                StepExpectation& expected);

 private:
  Checked apply_blocks(const StepProgram& program);
  Checked write_tokens(const StepProgram& program, const RowSlice& slice, RequestId id,
                       std::int32_t group, std::vector<Slot>& slots);
  Checked write_token(const StepProgram& program, const WorkerRequest& request, std::int32_t group,
                      std::int64_t position, ContentId now, Slot& slot);
  Checked advance_states(const StepProgram& program, std::span<const RequestId> requests,
                         StepExpectation& expected);
  StateBefore state_before(const StateUpdate& update) const;

  MemoryModel& model_;
  Worker& worker_;
};

// The positions that the tokens [first, last) of a request may attend to: [lowest, last).
std::int64_t first_attended(const KVCacheSpec& spec, std::int64_t first);

// Every row that the request's next tokens (from `first` on) will read holds the content of its own
// prefix; a finding otherwise. Asked when a request comes in with computed tokens: a wrong hit.
Checked check_hit(const MemoryModel& model, const ContextRank& context,
                  const WorkerRequest& request, const KVCacheConfig& plan, std::int64_t step,
                  std::int64_t first);

}  // namespace lockstep
