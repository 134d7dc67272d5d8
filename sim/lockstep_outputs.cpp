// The part of the loop that knows a step's outputs: what the model samples, what a connector's
// workers move and report, and when the engine hears of it.
#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "reference/check.h"
#include "sim/connectors/connector_report.h"
#include "sim/lockstep_loop.h"

namespace lockstep {

// A step is in flight from now on, with nothing in its output yet.
ModelOutput& LockstepLoop::begin_output(const SchedulerOutput& decision) {
  StepInFlight& flight = in_flight_.emplace_back();
  flight.step = decision.step;
  if (workload_.connector() != nullptr)
    for (const ScheduledRequest& scheduled : decision.scheduled)
      flight.rows.push_back(scheduled.id);
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
  return output;
}

// The model's answer to the step; the worker knows it at once, the engine when it processes it.
Result<void> LockstepLoop::sample(const SchedulerOutput& decision) {
  if (decision.scheduled.empty()) {
    if (empty_steps_are_in_flight()) begin_output(decision);
    return {};
  }
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
  ModelOutput& output = begin_output(decision);
  if (auto done = workload_.sample(decision.step, rows_, output); !done) return done;
  LS_CHECK(output.token_ends.size() == decision.scheduled.size(), "{} rows sampled, {} scheduled",
           output.token_ends.size(), decision.scheduled.size());
  if (workload_.is_scripted()) {
    if (auto sound = check_output(decision, output); !sound) return sound;
  }
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

// What no model could have returned for the step: a recording may say anything.
Result<void> LockstepLoop::check_output(const SchedulerOutput& decision,
                                        const ModelOutput& output) const {
  const auto refuse = [&](std::size_t row, std::string_view key, std::int64_t found,
                          std::int64_t expected) {
    return fail(fmt::format("step {}: {}: {} tokens of request {}; expected at most {}",
                            decision.step, key, found,
                            requests_[index_of(decision.scheduled[row].id)].name, expected));
  };
  const auto size = [](const std::vector<std::uint32_t>& ends, std::size_t row) {
    return ends[row] - (row == 0 ? 0 : ends[row - 1]);
  };
  for (std::size_t i = 0; i < decision.scheduled.size(); ++i) {
    const std::int64_t num_sampled = size(output.token_ends, i);
    if (num_sampled > decisions_.num_sampled_max(i))
      return refuse(i, "sampled", num_sampled, decisions_.num_sampled_max(i));
    const std::int64_t num_drafts = output.draft_ends.empty() ? 0 : size(output.draft_ends, i);
    if (num_drafts > config_.engine.num_spec_tokens)
      return refuse(i, "drafts", num_drafts, config_.engine.num_spec_tokens);
  }
  return {};
}

// With asynchronous scheduling a step stays in flight while the next one is decided.
LockstepLoop::OutputTaken LockstepLoop::process_output(bool anything_scheduled) {
  stopped_.clear();
  OutputTaken taken;
  if (in_flight_.empty()) return taken;
  const bool waits = !anything_scheduled || in_flight_.size() >= 2;
  if (config_.engine.async_scheduling &&
      !workload_.output_comes_in(in_flight_.front().step).value_or(waits))
    return taken;
  taken.is_empty = in_flight_.front().is_empty();
  taken.step = take_output();
  // An engine that has nothing to decide waits for what is left, in which nothing happened.
  while (!in_flight_.empty() && in_flight_.front().is_empty() &&
         workload_.output_comes_in(in_flight_.front().step).value_or(has_nothing_to_decide()))
    taken.step = take_output();
  return taken;
}

// The oldest output in flight reaches the engine. Returns whose it is.
std::int64_t LockstepLoop::take_output() {
  StepInFlight flight = std::move(in_flight_.front());
  in_flight_.pop_front();
  watch_.lap();
  const auto stopped = decisions_.update_from_output(flight.output);
  summary_.seconds.schedule += watch_.lap();
  stopped_.insert(stopped_.end(), stopped.begin(), stopped.end());
  if (!flight.output.kv_connector_output.invalid_block_ids.empty()) forget_voided_tokens();
  spare_outputs_.push_back(std::move(flight.output));
  return flight.step;
}

// Nobody runs or waits, nobody's blocks are being moved, and all ends have been reported.
bool LockstepLoop::has_nothing_to_decide() const {
  return !decisions_.has_unfinished_requests() && decisions_.held().empty() &&
         std::ranges::count(requests_, true, &LiveRequest::live) == std::ssize(decision_->finished);
}

// What was sampled behind blocks that a load did not fill, the engine has dropped; what is still on
// its way, it has not.
void LockstepLoop::forget_voided_tokens() {
  for (const RequestId id : decisions_.running()) {
    std::int64_t num_known = decisions_.num_tokens(id);
    for (const StepInFlight& flight : in_flight_) num_known += flight.num_sampled(id);
    LiveRequest& request = requests_[index_of(id)];
    request.num_output_tokens = num_known - request.num_prompt_tokens;
    if (device_ != nullptr) device_->drop_sampled(id, num_known);
  }
}

std::int64_t StepInFlight::num_sampled(RequestId id) const {
  const auto row = std::ranges::find(rows, id);
  if (row == rows.end()) return 0;
  const auto i = static_cast<std::size_t>(row - rows.begin());
  return output.token_ends[i] - (i == 0 ? 0 : output.token_ends[i - 1]);
}

// What the connector's workers will have done when the step is over.
Result<void> LockstepLoop::take_connector_report() {
  auto report = connector_report(workload_, decisions_, config_.device.plan);
  if (!report) return tl::unexpected(report.error());
  // The engine goes on behind a lost block before it knows of it (docs/findings.md, 15): what its
  // worker then reads is nobody's content.
  if (device_ != nullptr && config_.engine.async_scheduling && !report->invalid_block_ids.empty())
    return fail(
        fmt::format("step {}: blocks that a load did not fill, with asynchronous scheduling: on a "
                    "backend this is not modelled; run the decisions alone (--backend none), or "
                    "without such loads (--load-failures 0)",
                    decision_->step));
  // A transfer ends once; what is on its way to the engine has not ended it there yet.
  for (const auto ids :
       {&KVConnectorOutput::finished_recving, &KVConnectorOutput::finished_sending})
    for (const RequestId id : (*report).*ids)
      for (const StepInFlight& flight : in_flight_)
        if (std::ranges::find(flight.output.kv_connector_output.*ids, id) !=
            (flight.output.kv_connector_output.*ids).end())
          return fail(
              fmt::format("step {}: worker: a transfer of request {} is over, and was so in "
                          "step {}",
                          decision_->step, decisions_.name(id), flight.step));
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
