// The memory of a run: the worker's view of the requests, the program of each step, the memory
// model, the backend and their comparison, rank by rank; and the checks that look on at all ranks.
//
// (1) All ranks follow the same decisions; each has a plan, a model and a backend of its own.
// (2) The lowest rank that diverges is the one that is told.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/result.h"
#include "reference/types/scheduler_types.h"
#include "sim/engine/memory_check.h"
#include "sim/engine/run_config.h"
#include "sim/step/transfer_step.h"
#include "sim/verdict/checked.h"
#include "sim/verdict/run_summary.h"

namespace lockstep {

// Names the rank of the whole model's `config` in what it has found.
void set_rank(const BackendConfig& config, std::int32_t rank, Divergence& found);

class RankRun;

class RunMemory {
 public:
  // One backend for each of num_ranks(config.device), in their order. All of it outlives this.
  // Refused: what the memory model or the program builder cannot follow, and degrees that the plan
  // cannot be cut into.
  static Result<std::unique_ptr<RunMemory>> create(const RunConfig& config,
                                                   std::span<Backend* const> ranks,
                                                   std::span<MemoryCheck* const> checks,
                                                   RunSummary& summary);
  ~RunMemory();

  void add_request(RequestId id, const RequestSpec& spec);
  // Program, model, backend, comparison; slot mappings are padded to what was agreed on, at least.
  Checked run_step(const SchedulerOutput& decision, const StepTransfers& transfers,
                   const AgreedBatch& agreed, StateHashChain& chain);
  void append_sampled(RequestId id, std::span<const std::int32_t> tokens);
  // The engine has dropped what was sampled behind the request's first `num_tokens` tokens.
  void drop_sampled(RequestId id, std::int64_t num_tokens);
  // After the step's output: who has finished and still keeps its blocks.
  void release(std::span<const HeldRequest> held);
  Checked output_taken(std::span<const StoppedRequest> stopped, std::int64_t now_ns);
  // After the last step: every page; then the sentences on what was not checked.
  Checked finish(bool agreed);

 private:
  RunMemory(const RunConfig& config, std::span<MemoryCheck* const> checks, RunSummary& summary);
  template <class Call>
  Checked first_of_ranks(const Call& call);

  const BackendConfig config_;  // of the whole model
  RunSummary& summary_;
  const std::vector<MemoryCheck*> checks_;
  std::vector<std::unique_ptr<RankRun>> ranks_;
};

}  // namespace lockstep
