#include "sim/engine/faulty_workload.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace lockstep {
namespace {

// How long a step lasts whose output is late: twenty short ones of the default StepTimeModel.
constexpr std::int64_t kLateNs = 200'000'000;

bool limits_pool(FaultKind kind) {
  return kind == FaultKind::refuse_allocation || kind == FaultKind::pinch_pool;
}

}  // namespace

FaultyWorkload::FaultyWorkload(std::unique_ptr<Workload> inner, FaultPlan plan)
    : inner_(std::move(inner)), plan_(std::move(plan)) {
  for (const PlannedFault& fault : plan_.faults()) {
    if (is_abort(fault.kind)) aborts_.push_back(fault);
    limits_pool_ |= limits_pool(fault.kind);
  }
  looks_at_requests_ = !aborts_.empty();
}

Result<Turn> FaultyWorkload::next_turn(const LoopState& state, std::vector<WorkloadEvent>& events) {
  LS_CHECK(decisions_ != nullptr || plan_.empty(), "faults, and nobody to watch");
  step_ = state.step;
  for (const PlannedFault& fault : plan_.faults())
    if (limits_pool(fault.kind) && fault.is_active(step_)) count(fault.kind);
  if (limits_pool_) decisions_->limit_blocks_in_use(plan_.blocks_in_use_max(step_));
  LoopState seen = state;
  seen.idle &= !hinders(step_) && !hinders(step_ - 1);
  const std::size_t before = events.size();
  auto turn = inner_->next_turn(seen, events);
  if (!turn || *turn != Turn::step || !looks_at_requests_) return turn;
  for (std::size_t i = before; i < events.size(); ++i)
    if (events[i].kind == WorkloadEvent::Kind::add)
      requests_[events[i].request.name] = {events[i].request.prompt.size(), 0};
  in_step_.clear();
  left_before_ = std::exchange(left_, {});
  abort_due(false, events);
  return turn;
}

bool FaultyWorkload::hinders(std::int64_t step) const {
  return std::ranges::any_of(plan_.faults(), [step](const PlannedFault& fault) {
    return limits_pool(fault.kind) && fault.is_active(step);
  });
}

Result<void> FaultyWorkload::sample(std::int64_t step, std::span<const SampledRow> rows,
                                    ModelOutput& output) {
  if (looks_at_requests_)
    for (const SampledRow& row : rows) {
      in_step_.emplace_back(row.name);
      ++requests_.find(row.name)->second.num_steps;
    }
  return inner_->sample(step, rows, output);
}

void FaultyWorkload::while_running(std::vector<WorkloadEvent>& events) {
  inner_->while_running(events);
  if (looks_at_requests_) abort_due(true, events);
}

std::optional<bool> FaultyWorkload::output_comes_in(std::int64_t step) const {
  const auto inner = inner_->output_comes_in(step);
  if (inner) return inner;
  if (!plan_.is_active(FaultKind::early_output, step_)) return std::nullopt;
  count(FaultKind::early_output);
  return true;
}

void FaultyWorkload::step_done(std::int64_t scheduled_tokens) {
  const std::int64_t began_ns = inner_->now_ns();
  inner_->step_done(scheduled_tokens);
  if (scheduled_tokens == 0 || !plan_.is_active(FaultKind::late_output, step_)) return;
  inner_->advance_to(began_ns + kLateNs);
  count(FaultKind::late_output);
}

void FaultyWorkload::request_left(std::string_view name, std::uint64_t ticket) {
  if (looks_at_requests_) {
    left_.emplace_back(name);
    if (const auto request = requests_.find(name); request != requests_.end())
      requests_.erase(request);
  }
  inner_->request_left(name, ticket);
}

void FaultyWorkload::request_refused(std::string_view name, std::uint64_t ticket,
                                     const Error& why) {
  if (const auto request = requests_.find(name); request != requests_.end())
    requests_.erase(request);
  inner_->request_refused(name, ticket, why);
}

bool FaultyWorkload::is_in_phase(RequestId id, FaultKind kind) const {
  const RequestStatus status = decisions_->status(id);
  switch (kind) {
    case FaultKind::abort_waiting:
      return status == RequestStatus::waiting;
    case FaultKind::abort_preempted:
      return status == RequestStatus::preempted;
    case FaultKind::abort_loading:
      return status == RequestStatus::waiting_for_remote_kvs;
    default:
      break;
  }
  if (status != RequestStatus::running) return false;
  const std::string_view name = decisions_->name(id);
  if (kind == FaultKind::abort_in_flight)
    return std::ranges::find(in_step_, name) != in_step_.end();
  const Progress& progress = requests_.find(name)->second;
  if (decisions_->num_computed_tokens(id) >= progress.num_prompt_tokens)
    return kind == FaultKind::abort_decode;
  return kind ==
         (progress.num_steps <= 1 ? FaultKind::abort_first_chunk : FaultKind::abort_mid_prefill);
}

std::vector<std::string> FaultyWorkload::in_phase(FaultKind kind) const {
  if (kind == FaultKind::abort_again) return left_before_;
  std::vector<std::string> names;
  const auto take = [&](RequestId id) {
    if (is_in_phase(id, kind)) names.emplace_back(decisions_->name(id));
  };
  for (const RequestId id : decisions_->running()) take(id);
  for (const SkippedRequest& request : decisions_->skipped()) take(request.id);
  for (const RequestId id : decisions_->waiting()) take(id);
  return names;
}

// The aborts that are due, each of somebody else. Those of a step in flight come while it runs.
void FaultyWorkload::abort_due(bool in_flight, std::vector<WorkloadEvent>& events) {
  for (const SkippedRequest& request : decisions_->skipped())
    if (decisions_->status(request.id) == RequestStatus::preempted)
      requests_.find(decisions_->name(request.id))->second.num_steps = 0;
  for (const RequestId id : decisions_->waiting())
    if (decisions_->status(id) == RequestStatus::preempted)
      requests_.find(decisions_->name(id))->second.num_steps = 0;
  std::vector<std::string> gone;
  for (const WorkloadEvent& event : events)
    if (event.kind == WorkloadEvent::Kind::abort) gone.push_back(event.name);
  std::erase_if(aborts_, [&](const PlannedFault& fault) {
    if (fault.step > step_ || (fault.kind == FaultKind::abort_in_flight) != in_flight) return false;
    std::vector<std::string> names = in_phase(fault.kind);
    std::erase_if(names, [&](const auto& name) { return std::ranges::count(gone, name) > 0; });
    if (names.empty()) return false;
    WorkloadEvent& event = events.emplace_back();
    event.kind = WorkloadEvent::Kind::abort;
    event.name = names[static_cast<std::size_t>(fault.number) % names.size()];
    gone.push_back(event.name);
    count(fault.kind);
    return true;
  });
}

Result<std::unique_ptr<FaultyWorkload>> make_faulty_workload(std::unique_ptr<Workload> inner,
                                                             std::span<const Fault> faults) {
  auto plan = fault_plan_of(faults);
  if (!plan) return tl::unexpected(plan.error());
  if (!plan->empty() && inner->is_scripted())
    return fail(
        "faults beside recorded steps: what happened is recorded already; expected a trace, or no "
        "faults");
  return std::make_unique<FaultyWorkload>(std::move(inner), std::move(*plan));
}

}  // namespace lockstep
