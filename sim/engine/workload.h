// What reaches the engine and what the model answers: the two inputs of a run that the engine does
// not decide.
//
// Two implementations: a request trace, driven by a virtual clock in integer nanoseconds
// (trace_workload.cpp); and a recording, which gives step by step what happened before it and what
// was sampled (sim/recording/recording_workload.h). Others wrap one of them: connectors
// (sim/connectors/connect.h), faults (faults.h).
//
// Invariants
// (1) Calls follow the loop: next_turn(), connector_report(), sample(), while_running(),
//     output_comes_in(), step_done(), then request_left() for each request that ended. A wrapper
//     forwards every one of them.
// (2) The answers depend only on the workload's own options and on the calls so far, never on time
//     or on another run.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "reference/schedule/scheduler.h"
#include "reference/types/kv_connector.h"
#include "reference/types/scheduler_types.h"
#include "sim/step/transfer_step.h"
#include "traces/formats/request_trace.h"
#include "traces/formats/run_spec.h"

namespace lockstep {

// One event between two steps, or during one. Fields apply to the kinds that they name.
struct WorkloadEvent {
  enum class Kind : std::uint8_t { add, abort, reset_prefix_cache, pause_state, output };
  Kind kind = Kind::add;
  RequestSpec request{};                 // add
  std::uint64_t ticket = 0;              // add: returned in every SampledRow of the request
  std::string name;                      // abort
  std::optional<bool> recorded_reset{};  // reset_prefix_cache: recorded result; absent: unknown
  bool resets_running = false;           // reset_prefix_cache: preempts all running requests first
  PauseState pause_state = PauseState::unpaused;
  std::int64_t output_of_step = 0;  // output: outputs of steps up to this one arrive
};

// The previous step's outcome, from which the workload decides whether time advances or the run
// ends.
struct LoopState {
  std::int64_t step = 0;    // the step about to be decided
  bool idle = true;         // true if the previous step did nothing and nothing is in flight
  bool unfinished = false;  // true if requests are live
};

// The workload's verdict on what follows.
enum class Turn : std::uint8_t {
  step,   // apply the events and run a step
  end,    // no further arrivals and no live request
  stuck,  // no further arrivals; live requests wait forever
  cut,    // what follows is unknown
};

// One scheduled request as the sampler sees it. Views are valid during the call.
struct SampledRow {
  std::uint64_t ticket = 0;
  std::string_view name;
  std::int64_t num_prompt_tokens = 0;
  std::int64_t num_output_tokens = 0;  // so far
  std::int64_t computed = 0;           // tokens before this step, as the engine counts
  std::int32_t num_tokens = 0;         // of this step
  bool samples = false;                // false: a chunk of a prompt that ends before its last token
  bool is_new = false;                 // true if admitted in this step: its drafts are padding
  std::span<const std::int32_t> drafts;
};

// The step just decided, and the report that arrives with its output.
struct DecidedStep {
  const SchedulerOutput& decision;
  const DecisionSource& decisions;
  const KVConnectorOutput& report;             // of the planner's own workers
  std::span<const std::int64_t> block_tokens;  // per group: tokens of a table entry
};

// Plans what a KV connector moves in a step, once the step is decided.
class TransferPlanner {
 public:
  virtual ~TransferPlanner() = default;
  // Appends the step's transfers. `transfers.held` and `transfers.lost` are set by the caller.
  // Called once per step, after the connector's report().
  virtual void plan(const DecidedStep& step, StepTransfers& transfers) = 0;
};

class Workload {
 public:
  virtual ~Workload() = default;

  // Appends what happens before the next step and returns what follows. Errors: a bad record of a
  // file.
  virtual Result<Turn> next_turn(const LoopState& state, std::vector<WorkloadEvent>& events) = 0;
  // Appends the model's output of the step just decided: one row per scheduled request, in order; a
  // row may be empty.
  virtual Result<void> sample(std::int64_t step, std::span<const SampledRow> rows,
                              ModelOutput& output) = 0;
  // Returns the connector to caches elsewhere; null: none.
  virtual KVConnector* connector() { return nullptr; }
  // Appends what the connector's workers report with the output of the step just decided.
  virtual Result<void> connector_report(KVConnectorOutput&) { return {}; }
  // Returns the planner of what the connector moves; null: unknown, so the decisions can only run
  // without memory.
  virtual TransferPlanner* transfers() { return nullptr; }
  // True if an in-flight transfer may change the state with no request running, so an idle step is
  // no verdict yet.
  virtual bool is_busy() const { return false; }
  // Appends the events while the model runs: after the decision, before an output arrives.
  virtual void while_running(std::vector<WorkloadEvent>&) {}
  // True if the output of `step`, the oldest in flight, arrives now. Absent: it arrives when the
  // engine's own loop would wait for it. REQUIRES: asynchronous scheduling.
  virtual std::optional<bool> output_comes_in(std::int64_t /*step*/) const { return std::nullopt; }
  // True if a fault blocks the engine in that step: an idle step is not a verdict yet.
  virtual bool is_hindered(std::int64_t /*step*/) const { return false; }
  // Ends the step, which scheduled `scheduled_tokens`. Advances the clock.
  virtual void step_done(std::int64_t scheduled_tokens) = 0;
  // Called when a request ended in the completed step.
  virtual void request_left(std::string_view name, std::uint64_t ticket) = 0;
  // Called when the engine refuses a request: it never arrived.
  virtual void request_refused(std::string_view name, std::uint64_t ticket, const Error&) {
    request_left(name, ticket);
  }

  // True if every step is given, also idle ones, and the run ends with them: a deadlock is never a
  // verdict of such a run.
  virtual bool is_scripted() const { return false; }
  // True if the outputs belong to a step with other rows: an engine or a model decided otherwise
  // than the recording.
  virtual bool has_parted(std::span<const SampledRow>) const { return false; }
  // Features of the scheduler protocol that its events need, as far as known before the run.
  virtual std::vector<std::string_view> features() const { return {}; }
  // "FILE:LINE" of the last record, for errors; empty: no file.
  virtual std::string place() const { return {}; }
  virtual std::int64_t now_ns() const = 0;
  // next_due_ns(): time of the next event; absent: none is known. advance_to(): moves the clock
  // forward, never back. For callers that keep the time of several engines, in place of
  // step_done(), or that make a step longer.
  virtual std::optional<std::int64_t> next_due_ns() const { return std::nullopt; }
  virtual void advance_to(std::int64_t /*now_ns*/) {}
  virtual std::int64_t records_consumed() const = 0;  // of the trace, or steps of the recording
};

struct TraceWorkloadOptions {
  StepTimeModel step_time;
  std::uint64_t seed = 0;  // of sampled tokens that the trace does not give
  std::int32_t num_spec_tokens = 0;
  std::int32_t draft_acceptance_percent = 60;  // % of drafts that are right
  std::int32_t short_drafts_percent = 0;  // % of proposals with fewer than num_spec_tokens drafts
  bool async_scheduling = false;          // true: only the worker has the drafts
};

// Makes the workload of a trace, driven by the virtual clock. REQUIRES: no two requests of one
// name.
std::unique_ptr<Workload> make_trace_workload(std::shared_ptr<const Trace> trace,
                                              const TraceWorkloadOptions& options);
std::unique_ptr<Workload> make_trace_workload(Trace trace, const TraceWorkloadOptions& options);

}  // namespace lockstep
