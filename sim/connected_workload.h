// A workload beside a simulated KV connector: what arrives and is sampled is the workload's, what
// is elsewhere is the connector's. Steps in which nothing runs go on while a transfer is under way.
#pragma once

#include <memory>
#include <utility>

#include "sim/simulated_connector.h"
#include "sim/workload.h"

namespace lockstep {

class ConnectedWorkload final : public Workload {
 public:
  ConnectedWorkload(std::unique_ptr<Workload> inner, const SimulatedConnectorOptions& options)
      : inner_(std::move(inner)), connector_(options) {}

  KVConnector* connector() override { return &connector_; }
  Result<void> connector_report(KVConnectorOutput& report) override {
    was_busy_ = connector_.is_busy();
    report = connector_.report();
    return {};
  }
  Result<Turn> next_turn(const LoopState& state, std::vector<WorkloadEvent>& events) override {
    LoopState seen = state;
    seen.idle &= !was_busy_;
    return inner_->next_turn(seen, events);
  }
  Result<void> sample(std::int64_t step, std::span<const SampledRow> rows,
                      ModelOutput& output) override {
    return inner_->sample(step, rows, output);
  }
  void while_running(std::vector<WorkloadEvent>& events) override { inner_->while_running(events); }
  std::optional<bool> output_comes_in() const override { return inner_->output_comes_in(); }
  void step_done(std::int64_t scheduled_tokens) override { inner_->step_done(scheduled_tokens); }
  void request_left(std::string_view name, std::uint64_t ticket) override {
    inner_->request_left(name, ticket);
  }
  bool is_scripted() const override { return inner_->is_scripted(); }
  std::int64_t now_ns() const override { return inner_->now_ns(); }
  std::int64_t records_consumed() const override { return inner_->records_consumed(); }

 private:
  std::unique_ptr<Workload> inner_;
  SimulatedConnector connector_;
  bool was_busy_ = false;
};

}  // namespace lockstep
