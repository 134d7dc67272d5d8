// The part of the loop that knows a step's outputs: what the model samples, what a connector's
// workers move and report, and when the engine hears of it.
#include <utility>

#include "reference/check.h"
#include "sim/connectors/connector_report.h"
#include "sim/lockstep_loop.h"

namespace lockstep {

// The model's answer to the step; the worker knows it at once, the engine when it processes it.
Result<void> LockstepLoop::sample(const SchedulerOutput& decision) {
  if (decision.scheduled.empty()) return {};
  rows_.clear();
  const std::int32_t* draft = decision.spec_tokens.data();
  for (const ScheduledRequest& scheduled : decision.scheduled) {
    const LiveRequest& request = requests_[index_of(scheduled.id)];
    const auto num_spec = static_cast<std::size_t>(scheduled.num_spec);
    const std::int64_t known = request.num_prompt_tokens + request.num_output_tokens;
    rows_.push_back({.ticket = request.ticket,
                     .name = request.name,
                     .num_prompt_tokens = request.num_prompt_tokens,
                     .num_output_tokens = request.num_output_tokens,
                     .samples = scheduled.computed + scheduled.num_tokens >= known,
                     .drafts = {draft, num_spec}});
    draft += num_spec;
  }
  StepInFlight& flight = in_flight_.emplace_back();
  flight.step = decision.step;
  if (!spare_outputs_.empty()) {
    flight.output = std::move(spare_outputs_.back());
    spare_outputs_.pop_back();
  }
  ModelOutput& output = flight.output;
  output.tokens.clear();
  output.token_ends.clear();
  output.draft_tokens.clear();
  output.draft_ends.clear();
  output.kv_connector_output.clear();
  if (auto done = workload_.sample(decision.step, rows_, output); !done) return done;
  LS_CHECK(output.token_ends.size() == decision.scheduled.size(), "{} rows sampled, {} scheduled",
           output.token_ends.size(), decision.scheduled.size());
  std::uint32_t begin = 0;
  for (std::size_t i = 0; i < decision.scheduled.size(); ++i) {
    const std::uint32_t end = output.token_ends[i];
    LiveRequest& request = requests_[index_of(decision.scheduled[i].id)];
    request.num_output_tokens += end - begin;
    if (end != begin) progress_.sampled();
    if (device_ != nullptr)
      device_->append_sampled(decision.scheduled[i].id,
                              std::span(output.tokens).subspan(begin, end - begin));
    begin = end;
  }
  return {};
}

// With asynchronous scheduling a step stays in flight while the next one is decided.
std::span<const StoppedRequest> LockstepLoop::process_output(bool anything_scheduled,
                                                             std::int64_t& output_of_step) {
  if (in_flight_.empty()) return {};
  if (config_.engine.async_scheduling) {
    const bool waits = !anything_scheduled || in_flight_.size() >= 2;
    if (!workload_.output_comes_in().value_or(waits)) return {};
  }
  StepInFlight& flight = in_flight_.front();
  output_of_step = flight.step;
  watch_.lap();
  const auto stopped = decisions_.update_from_output(flight.output);
  summary_.seconds.schedule += watch_.lap();
  if (!flight.output.kv_connector_output.invalid_block_ids.empty()) forget_voided_tokens();
  spare_outputs_.push_back(std::move(flight.output));
  in_flight_.pop_front();
  return stopped;
}

// What was sampled behind blocks that a load did not fill, the engine has dropped.
void LockstepLoop::forget_voided_tokens() {
  for (const RequestId id : decisions_.running()) {
    LiveRequest& request = requests_[index_of(id)];
    request.num_output_tokens = decisions_.num_tokens(id) - request.num_prompt_tokens;
    if (device_ != nullptr) device_->drop_sampled(id, decisions_.num_tokens(id));
  }
}

// What the connector's workers will have done when the step is over.
Result<void> LockstepLoop::take_connector_report() {
  auto report = connector_report(workload_, decisions_, config_.device.plan);
  if (!report) return tl::unexpected(report.error());
  connector_report_ = std::move(*report);
  return {};
}

void LockstepLoop::plan_transfers(const SchedulerOutput& decision) {
  if (workload_.transfers() == nullptr) return;
  transfers_.clear();
  for (const HeldRequest& held : decisions_.held()) transfers_.held.push_back(held.id);
  transfers_.lost = connector_report_.invalid_block_ids;
  workload_.transfers()->plan({.decision = decision,
                               .decisions = decisions_,
                               .report = connector_report_,
                               .block_tokens = block_tokens_},
                              transfers_);
  summary_.blocks_loaded += std::ssize(transfers_.loads);
  summary_.blocks_stored += std::ssize(transfers_.stores);
  summary_.blocks_lost += std::ssize(transfers_.lost);
  summary_.host_evictions = transfers_.num_evicted;
  summary_.frees_delayed = transfers_.num_frees_delayed;
}

// Comes in with the step's output, also when the step runs nothing.
void LockstepLoop::attach_connector_report() {
  if (connector_report_.empty()) return;
  if (in_flight_.empty()) in_flight_.push_back({.step = -1, .output = {}});
  in_flight_.back().output.kv_connector_output = std::move(connector_report_);
  progress_.reported();
}

}  // namespace lockstep
