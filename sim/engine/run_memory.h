// The memory of a run: the worker's view of the requests, the program of each step, the memory
// model, the backend and their comparison, per rank; and the checks that span all ranks.
//
// Invariants
// (1) All ranks follow the same decisions. Each has its own plan, model and backend.
// (2) The lowest diverging rank is reported; later ranks do not run that step.
// (3) A call that returns a finding or an error is the last one before finish().
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

// One rank of memory, for checks that span ranks. All references outlive the run's checks.
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

  // Called once, before the first step. `config`: of the whole model.
  virtual void begin(const BackendConfig& config, std::span<const RankMemory> ranks,
                     RunSummary& summary) = 0;
  // Called when a step has run on all ranks and each has compared equal.
  virtual Checked step_compared() { return {}; }
  // Called when the step's output is processed. It ended `stopped`, whose blocks no other request
  // has received yet, so their contents can still be read.
  virtual Checked output_taken(std::span<const StoppedRequest> /*stopped*/,
                               std::int64_t /*now_ns*/) {
    return {};
  }
  // Called after the last step, whatever the verdict: adds the counts. `agreed`: no check has found
  // anything so far.
  virtual Checked finish(bool agreed) = 0;
  // Reasons why something was not checked, one line each, in addition to the ranks' own.
  virtual std::vector<std::string> not_checked() const { return {}; }
};

// Sets the rank fields of a divergence. A degree of 1 leaves its field at -1.
void set_rank(const BackendConfig& config, std::int32_t rank, Divergence& found);

class RankRun;

class RunMemory {
 public:
  // Creates the memory of all ranks. `ranks`: one backend for each of num_ranks(config.backend), in
  // their order. All arguments outlive this. Errors: a model or plan that memory model or program
  // builder cannot follow; degrees that do not divide the plan.
  static Result<std::unique_ptr<RunMemory>> create(const RunConfig& config,
                                                   std::span<Backend* const> ranks,
                                                   std::span<MemoryCheck* const> checks,
                                                   RunSummary& summary);
  ~RunMemory();

  // Adds a request on every rank, before a decision names it.
  void add_request(RequestId id, const RequestSpec& spec);
  // Runs a step on every rank: program, model, backend, comparison. Slot mappings are padded at
  // least to the batch that the ranks agreed on. `output`: what was sampled and drafted in the
  // step.
  Checked run_step(const SchedulerOutput& decision, const ModelOutput& output,
                   const StepTransfers& transfers, const AgreedBatch& agreed,
                   StateHashChain& chain);
  // Adds sampled tokens, which also decide the state blocks that the step's drafts leave.
  void append_sampled(RequestId id, std::span<const std::int32_t> tokens);
  // Drops what was sampled after the request's first `num_tokens` tokens, as the engine has done.
  void drop_sampled(RequestId id, std::int64_t num_tokens);
  // Removes a request from the batch before the next step: a reset has preempted it, which releases
  // before 0.27.0 do not report in a decision.
  void preempt(RequestId id);
  // Frees the blocks of finished requests that are not in `held`. Called after the step's output.
  void release(std::span<const HeldRequest> held);
  // Calls the checks that follow a step's output.
  Checked output_taken(std::span<const StoppedRequest> stopped, std::int64_t now_ns);
  // Compares every page if `agreed`, then collects counts and the reasons why something was not
  // checked.
  Checked finish(bool agreed);

 private:
  RunMemory(const RunConfig& config, std::span<MemoryCheck* const> checks, RunSummary& summary);
  // Calls every rank in order until one fails; names that rank in its finding.
  template <class Call>
  Checked first_of_ranks(const Call& call);
  void say_what_was_not_checked(bool agreed);

  const BackendConfig config_;  // of the whole model
  RunSummary& summary_;
  const std::vector<MemoryCheck*> checks_;
  std::vector<std::unique_ptr<RankRun>> ranks_;
};

}  // namespace lockstep
