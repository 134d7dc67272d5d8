// Writes a run as an engine recording that conform, audit and replay read, so that a generated or
// traced case can be kept, shrunk, and sent to the engine's own developers.
//
// Invariants
// (1) Recording changes neither the workload nor the decisions.
// (2) Reading the file gives the run's own steps.
//
// It wraps the workload (events and samples) and observes the loop (decisions). It records tables
// every eighth step, as recordings of vLLM do. Events during the model's run are written before the
// next step. With a KV connector it also records answers and reports; the caller that writes the
// header adds the connector there.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/result.h"
#include "sim/engine/step_observer.h"
#include "sim/engine/workload.h"
#include "sim/recording/recorded_terms.h"
#include "traces/formats/recording.h"

namespace lockstep {

// The header of a recording of this configuration, with the deciding engine's block sizes.
// REQUIRES: a profile's name, "NAME-VERSION", in config.engine.
RecordingHeader recording_header(const EngineConfig& config,
                                 const std::vector<KVCacheGroupSpec>& groups,
                                 std::int64_t num_blocks, const DecisionSource& decisions);

class RunRecorder final : public Workload, public StepObserver {
 public:
  using Sink = std::function<void(const RecordedStep&)>;
  // Both must outlive the recorder; `sink` is given each step when it is complete.
  RunRecorder(Workload& inner, Sink sink) : inner_(inner), sink_(std::move(sink)) {
    if (inner.connector() != nullptr) connector_.emplace(*inner.connector());
  }

  // The header of this run's recording, with the traits of the connector. `policy`: of its loads.
  RecordingHeader header(const EngineConfig& config, const std::vector<KVCacheGroupSpec>& groups,
                         std::int64_t num_blocks, const DecisionSource& decisions,
                         KVLoadFailurePolicy policy) const;
  // After the run: the end line. `unfinished` are the live requests, running first.
  RecordingEnd end() const { return {.steps = num_steps_, .unfinished = unfinished_.sorted()}; }
  // The current step as far as it was recorded.
  const RecordedStep& step() const { return step_; }

  Result<Turn> next_turn(const LoopState& state, std::vector<WorkloadEvent>& events) override;
  Result<void> sample(std::int64_t step, std::span<const SampledRow> rows,
                      ModelOutput& output) override;
  // The scheduler is to be given this one, so that its questions are recorded.
  KVConnector* connector() override { return connector_ ? &*connector_ : nullptr; }
  Result<void> connector_report(KVConnectorOutput& report) override;
  TransferPlanner* transfers() override { return inner_.transfers(); }
  bool is_busy() const override { return inner_.is_busy(); }
  void while_running(std::vector<WorkloadEvent>& events) override;
  std::optional<bool> output_comes_in(std::int64_t step) const override {
    return inner_.output_comes_in(step);
  }
  bool is_hindered(std::int64_t step) const override { return inner_.is_hindered(step); }
  void step_done(std::int64_t scheduled_tokens) override { inner_.step_done(scheduled_tokens); }
  void request_left(std::string_view name, std::uint64_t ticket) override {
    inner_.request_left(name, ticket);
  }
  // What the engine did not take is not in the recording.
  void request_refused(std::string_view name, std::uint64_t ticket, const Error& error) override;
  bool is_scripted() const override { return inner_.is_scripted(); }
  bool has_parted(std::span<const SampledRow> rows) const override {
    return inner_.has_parted(rows);
  }
  std::string place() const override { return inner_.place(); }
  std::int64_t now_ns() const override { return inner_.now_ns(); }
  std::int64_t records_consumed() const override { return inner_.records_consumed(); }

  bool decided(const StepView& view) override;
  bool finished(const StepView& view) override;

 private:
  void take_events(std::span<const WorkloadEvent> events, std::vector<RecordedEvent>& into);

  Workload& inner_;
  Sink sink_;
  std::optional<ConnectorLog> connector_;
  RecordedStep step_;
  std::int64_t num_steps_ = 0;
  UnfinishedNames unfinished_;
};

}  // namespace lockstep
