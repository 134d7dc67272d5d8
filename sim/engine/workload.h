// What reaches the engine and what the model answers: the two inputs of a run that the engine does
// not decide.
//
// Two of them: a request trace, driven by a virtual clock in integer nanoseconds; and a recording,
// which says step by step what happened before it and what was sampled
// (sim/recording/recording_workload.h).
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

// One thing that happens between two steps.
struct WorkloadEvent {
  enum class Kind : std::uint8_t { add, abort, reset_prefix_cache, pause_state, output };
  Kind kind = Kind::add;
  RequestSpec request;                 // add
  std::uint64_t ticket = 0;            // add: comes back in every SampledRow of the request
  std::string name;                    // abort
  std::optional<bool> recorded_reset;  // reset_prefix_cache: what the recording says it returned
  bool resets_running = false;         // reset_prefix_cache: preempts all running requests first
  PauseState pause_state = PauseState::unpaused;
  std::int64_t output_of_step = 0;  // output: steps up to this one arrive
};

// The previous step: gives the workload the time and the waiting requests.
struct LoopState {
  std::int64_t step = 0;    // the step about to be decided
  bool idle = true;         // the previous step did nothing and nothing is in flight
  bool unfinished = false;  // requests are live
};

// What comes next.
enum class Turn : std::uint8_t {
  step,   // apply the events and run a step
  end,    // no further arrivals and no live request
  stuck,  // no further arrivals; live requests wait forever
  cut,    // what follows is unknown
};

// One scheduled request as the sampler sees it.
struct SampledRow {
  std::uint64_t ticket = 0;
  std::string_view name;
  std::int64_t num_prompt_tokens = 0;
  std::int64_t num_output_tokens = 0;  // so far
  bool samples = false;                // false: a chunk of a prompt that ends before its last token
  bool is_new = false;                 // enters in this step: its drafts are padding
  std::span<const std::int32_t> drafts;
};

// The step just decided, and what arrives with its output.
struct DecidedStep {
  const SchedulerOutput& decision;
  const DecisionSource& decisions;
  const KVConnectorOutput& report;             // of the planner's own workers
  std::span<const std::int64_t> block_tokens;  // per group, that an entry of a table stands for
};

// Plans what a KV connector moves in a step, once the step is decided.
class TransferPlanner {
 public:
  virtual ~TransferPlanner() = default;
  // Appends to `transfers`; `held` and the report's `lost` blocks are there.
  virtual void plan(const DecidedStep& step, StepTransfers& transfers) = 0;
};

class Workload {
 public:
  virtual ~Workload() = default;

  // What happens before the next step, appended to `events`.
  virtual Result<Turn> next_turn(const LoopState& state, std::vector<WorkloadEvent>& events) = 0;
  // The model's output of the step just decided: rows as scheduled.
  virtual Result<void> sample(std::int64_t step, std::span<const SampledRow> rows,
                              ModelOutput& output) = 0;
  // The connector to caches elsewhere, or null.
  virtual KVConnector* connector() { return nullptr; }
  // What the connector's workers report with the output of the step just decided, appended.
  virtual Result<void> connector_report(KVConnectorOutput&) { return {}; }
  // What the connector moves; null: not known, and the decisions can only be run alone.
  virtual TransferPlanner* transfers() { return nullptr; }
  // True if an in-flight transfer may change the state with no request running, so an idle step is
  // no verdict yet.
  virtual bool is_busy() const { return false; }
  // Events while the model runs: after the decision, before an output arrives.
  virtual void while_running(std::vector<WorkloadEvent>&) {}
  // Whether the output of `step`, the oldest in flight, arrives now. Absent: when the engine's own
  // loop would wait for it. REQUIRES: asynchronous scheduling.
  virtual std::optional<bool> output_comes_in(std::int64_t /*step*/) const { return std::nullopt; }
  // A fault keeps the engine from getting on in that step: that nothing happens is no verdict yet.
  virtual bool is_hindered(std::int64_t /*step*/) const { return false; }
  // Ends the step, which scheduled `scheduled_tokens`. Advances the clock.
  virtual void step_done(std::int64_t scheduled_tokens) = 0;
  // A request ended in the completed step, or was refused.
  virtual void request_left(std::string_view name, std::uint64_t ticket) = 0;
  // The engine does not take it.
  virtual void request_refused(std::string_view name, std::uint64_t ticket, const Error&) {
    request_left(name, ticket);
  }

  // Every step is given, idle ones too, and the run ends with them: no verdict of waiting forever.
  virtual bool is_scripted() const { return false; }
  // "FILE:LINE" of what it gave last, for errors; empty: it is in no file.
  virtual std::string place() const { return {}; }
  virtual std::int64_t now_ns() const = 0;
  // When something arrives next (nothing: no more), and that it is this late. For callers that keep
  // the time of several engines, in place of step_done(), or make a step last.
  virtual std::optional<std::int64_t> next_due_ns() const { return std::nullopt; }
  virtual void advance_to(std::int64_t /*now_ns*/) {}
  virtual std::int64_t records_consumed() const = 0;  // of the trace, or steps of the recording
};

struct TraceWorkloadOptions {
  StepTimeModel step_time;
  std::uint64_t seed = 0;  // of sampled tokens that the trace does not give
  std::int32_t num_spec_tokens = 0;
  std::int32_t draft_acceptance_percent = 60;  // with num_spec_tokens
  std::int32_t short_drafts_percent = 0;       // of the times: fewer drafts than num_spec_tokens
  bool async_scheduling = false;               // then the worker alone knows the drafts
};

// By the virtual clock. REQUIRES: no two requests of one name.
std::unique_ptr<Workload> make_trace_workload(std::shared_ptr<const Trace> trace,
                                              const TraceWorkloadOptions& options);
std::unique_ptr<Workload> make_trace_workload(Trace trace, const TraceWorkloadOptions& options);

}  // namespace lockstep
