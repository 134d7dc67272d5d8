// Builds a step's program from a decision: rows, tables, poison, zeroing, state copies, contents.
// The worker's part of an engine (vllm/v1/worker/gpu_model_runner.py, mamba_utils.py).
//
// Invariants
// (1) build() changes the worker's rows and tables, never the memory model.
// (2) A decision that cannot be executed (a token without a block, no free row) is a finding,
//     reported as a Divergence of Phase::decide.
//
// Not here: what the step reads back (probe_planner.h).
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/ids.h"
#include "reference/memory/memory_model.h"
#include "reference/types/engine_config.h"
#include "reference/types/scheduler_types.h"
#include "sim/protocol/backend.h"
#include "sim/step/transfer_step.h"
#include "sim/step/worker.h"
#include "sim/verdict/divergence.h"

namespace lockstep {

// Turns decisions into programs, one per step, in order.
class ProgramBuilder {
 public:
  ProgramBuilder(const EngineConfig& engine, const BackendConfig& config, const MemoryModel& model,
                 Worker& worker);

  // Applies the number of tokens that the model sampled for a request of the last program: a state
  // at a block's end that drafts carried past it is copied back by the next program.
  void settle_states(RequestId id, std::int64_t num_sampled);

  // Replaces `program` by that of a decision. REQUIRES: decisions of consecutive steps.
  Checked build(const SchedulerOutput& decision, const StepTransfers& transfers,
                StepProgram& program);
  // Forgets finished requests that are no longer in `held`: their blocks are free now.
  void release(std::span<const HeldRequest> held);
  // Removes a request from the batch in the next program, if it has run.
  void preempt(RequestId id);

  // The request of each entry of StepProgram::rows of the last program.
  std::span<const RequestId> row_requests() const { return row_requests_; }
  // Returns true if row `index` of the program computes after a block that was not loaded:
  // transfer_step.h, (2).
  bool is_void(std::size_t index) const { return void_rows_[index]; }
  // Returns the number of zero list entries whose blocks were not allocated in their step.
  std::int64_t ignored_zeros() const { return ignored_zeros_; }

 private:
  const KVCacheSpec& spec_of(std::int32_t group) const { return config_.plan.groups[group].spec; }
  // Each method below handles one part of build(); program_states.cpp has those for states.
  Checked enter(const SchedulerOutput& decision, std::size_t index, StepProgram& program);
  // Removes finished and preempted requests from the batch.
  void leave(const SchedulerOutput& decision, const StepTransfers& transfers, StepProgram& program);
  void forget(RequestId id);
  // Allocates the blocks of loads that start in this step.
  void begin_loads(const StepTransfers& transfers, StepProgram& program);
  void restore_pages(const SchedulerOutput& decision, StepProgram& program);
  bool was_restored(const ScheduledRequest& scheduled, BlockId block, std::size_t page);
  bool keeps_rows(const SchedulerOutput& decision, const ScheduledRequest& scheduled,
                  std::int32_t group, std::size_t entry, BlockId block, StepProgram& program);
  // Returns true if the row computes after a block whose load failed.
  bool counts_on_lost(const ScheduledRequest& scheduled, std::span<const BlockId> lost);
  // Extends or replaces the request's block tables.
  void append_blocks(const SchedulerOutput& decision, std::size_t index, StepProgram& program);
  // Sets or clears the marks of the blocks on the zero list.
  void mark_to_be_zeroed(const SchedulerOutput& decision, bool mark);
  // Marks a block as allocated to a group in this step, and poisons its old content.
  void hand_out(std::int32_t group, BlockId block, StepProgram& program);
  Checked copy_parts(const SchedulerOutput& decision, StepProgram& program);
  // Adds the engine's zero list, block by block with its group.
  Checked add_zeros(const SchedulerOutput& decision, StepProgram& program);
  Checked add_tokens(const SchedulerOutput& decision, std::size_t index, std::size_t first_spec,
                     StepProgram& program);
  Checked add_encoder_rows(const ScheduledRequest& scheduled, std::span<const std::int32_t> items,
                           StepProgram& program);
  Checked add_state_updates(const ScheduledRequest& scheduled, const RowSlice& slice,
                            StepProgram& program);
  // Adds the updates of one row's state in one group.
  Checked advance_state(std::int32_t group, const ScheduledRequest& scheduled,
                        const RowSlice& slice, StepProgram& program);
  // Splits the chunk's update at the last possible hit, if the worker exports a state there.
  Checked export_checkpoint(const WorkerRequest& request, std::int64_t base, StepProgram& program,
                            StateUpdate& update) const;
  void advance_every_block(std::int32_t group, const RowSlice& slice,
                           const std::vector<BlockId>& table, StepProgram& program) const;

  // Positions at which hits can end, in tokens: a worker exports states at these.
  struct HitEnds {
    std::int64_t hash_block_size = 1;
    std::int64_t alignment = 1;
    std::int32_t lookahead = 0;    // tokens after a block that its hash covers
    bool drop_last_block = false;  // EAGLE without such hashes
  };
  static HitEnds hit_ends_of(const EngineConfig& engine, const KVCacheConfig& plan);

  const EngineConfig engine_;
  const BackendConfig config_;
  const HitEnds hits_;
  const std::int64_t num_replayed_;  // tokens of a hit that windows compute again; 0: none
  const MemoryModel& model_;
  Worker& worker_;
  std::vector<RequestId> row_requests_;
  // group of each block allocated in this step; -1: not allocated
  IdVector<BlockId, std::int32_t> group_of_block_;
  IdVector<BlockId, std::uint8_t> to_be_zeroed_;  // 0 or 1: in this step
  std::vector<BlockId> handed_;
  std::map<BlockId, RequestId> hit_;          // blocks hit in this step, by request
  std::vector<BlockCopy> settled_;            // for the next program
  std::vector<std::int32_t> preempted_rows_;  // for the next program
  // By block: the request that loads into it and has not run since; absent: no load.
  using LoadedFor = IdVector<BlockId, std::optional<RequestId>>;
  LoadedFor loaded_for_;
  LoadedFor restored_for_;                     // a page of its load, from the host
  std::map<BlockId, RequestId> host_loads_{};  // the same, by block of the host pool
  std::vector<RequestId> held_;                // finished, but their blocks are not free
  // Names of requests that the current decision reports finished. A new request of that name is
  // the next chunk of a session, in its blocks; the last block may hold some of its rows.
  std::set<std::string> left_;
  std::vector<bool> void_rows_;  // of the last program
  std::int64_t ignored_zeros_ = 0;
};

// A finding about a decision, for a request and a group (-1: none).
Divergence decision_finding(std::int64_t step, std::string request, std::int32_t group,
                            std::string message);

}  // namespace lockstep
