// The memory of a run: the worker's view of the requests, the program of each step, the memory
// model, the backend and their comparison, per rank; and the checks that span all ranks.
//
// Invariants
// (1) All ranks follow the same decisions. Each has its own plan, model and backend.
// (2) The lowest diverging rank is reported.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "reference/memory/memory_model.h"
#include "reference/types/scheduler_types.h"
#include "sim/engine/step_observer.h"
#include "sim/protocol/backend.h"
#include "sim/step/transfer_step.h"
#include "sim/step/worker.h"
#include "sim/verdict/divergence.h"
#include "sim/verdict/run_summary.h"

namespace lockstep {

// One rank of memory. All of it outlives the run's checks.
struct RankMemory {
  const BackendConfig& config;  // with the rank's own plan
  MemoryModel& model;
  Worker& worker;
  Backend& backend;
  const StepProgram& program;  // of the current step; step -1: none yet
};

// Memory checks in addition to the per-rank comparison: all ranks together, extracted hidden
// states.
class MemoryCheck {
 public:
  virtual ~MemoryCheck() = default;

  // Once, before the first step. `config`: of the whole model.
  virtual void begin(const BackendConfig& config, std::span<const RankMemory> ranks,
                     RunSummary& summary) = 0;
  // A step has run on all ranks, and each has compared equal.
  virtual Checked step_compared() { return {}; }
  // The step's output is processed: it ended these, and their blocks are not given to others yet.
  virtual Checked output_taken(std::span<const StoppedRequest> /*stopped*/,
                               std::int64_t /*now_ns*/) {
    return {};
  }
  // After the last step, whatever the verdict: the counts. `agreed`: nothing was found so far.
  virtual Checked finish(bool agreed) = 0;
  // Reasons why something was not checked, one line each, in addition to the ranks' own.
  virtual std::vector<std::string> not_checked() const { return {}; }
};

// Names the rank of the whole model's `config` in what it has found.
void set_rank(const BackendConfig& config, std::int32_t rank, Divergence& found);

class RankRun;

class RunMemory {
 public:
  // One backend for each of num_ranks(config.backend), in their order. All of it outlives this.
  // Refused: what model or program builder cannot follow, degrees that do not divide the plan.
  static Result<std::unique_ptr<RunMemory>> create(const RunConfig& config,
                                                   std::span<Backend* const> ranks,
                                                   std::span<MemoryCheck* const> checks,
                                                   RunSummary& summary);
  ~RunMemory();

  void add_request(RequestId id, const RequestSpec& spec);
  // Program, model, backend, comparison; slot mappings are padded to what was agreed on, at least.
  // `output`: what was sampled and drafted in it.
  Checked run_step(const SchedulerOutput& decision, const ModelOutput& output,
                   const StepTransfers& transfers, const AgreedBatch& agreed,
                   StateHashChain& chain);
  void append_sampled(RequestId id, std::span<const std::int32_t> tokens);
  // The engine has dropped what was sampled behind the request's first `num_tokens` tokens.
  void drop_sampled(RequestId id, std::int64_t num_tokens);
  // After the step's output: finished requests that keep their blocks.
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
