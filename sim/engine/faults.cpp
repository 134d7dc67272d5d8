#include "sim/engine/faults.h"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <utility>

#include "base/check.h"
#include "base/number_text.h"

namespace lockstep {
namespace {

// Far above any run, and low enough for sums of steps to stay within int64.
constexpr std::int64_t kStepMax = std::int64_t{1} << 40;
// Longest duration: delays requests noticeably, without a run that only waits for it.
constexpr std::int64_t kStepsMax = 1'000;

struct KindInfo {
  std::string_view name;
  bool lasts = false;            // takes `steps`
  std::string_view number = {};  // the other argument it takes; empty: none
};

// By FaultKind. The names are part of the file format.
constexpr KindInfo kKinds[] = {
    {"refuse_allocation", true},
    {"pinch_pool", true, "blocks"},
    {"early_output", true},
    {"late_output", true},
    {"abort_waiting", false, "place"},
    {"abort_first_chunk", false, "place"},
    {"abort_mid_prefill", false, "place"},
    {"abort_decode", false, "place"},
    {"abort_preempted", false, "place"},
    {"abort_in_flight", false, "place"},
    {"abort_loading", false, "place"},
    {"abort_again"},
};
static_assert(std::size(kKinds) == kNumFaultKinds);

const KindInfo& info_of(FaultKind kind) { return kKinds[static_cast<std::size_t>(kind)]; }

Result<FaultKind> kind_of(std::string_view name) {
  const auto kind = std::ranges::find(kKinds, name, &KindInfo::name);
  if (kind != std::end(kKinds)) return static_cast<FaultKind>(kind - std::begin(kKinds));
  return fail("unknown fault {}; expected one of {}", name, joined(kKinds, &KindInfo::name));
}

// Checks that every number is in its range. `what` names the fault in the error.
Result<PlannedFault> checked(const PlannedFault& fault, std::string_view what) {
  if (fault.step < 0 || fault.step > kStepMax)
    return fail("{}: step {}; expected 0 to {}", what, fault.step, kStepMax);
  if (fault.steps < 1 || fault.steps > kStepsMax)
    return fail("{}: {} steps; expected 1 to {}", what, fault.steps, kStepsMax);
  if (fault.number < 0)
    return fail("{}: {} is negative; expected {} of 0 or more", what, fault.number,
                info_of(fault.kind).number);
  return fault;
}

// Turns a fault of a file into a planned one. `place` is optional: 0, the first request in the
// phase. `blocks` has no meaningful default and is required.
Result<PlannedFault> planned(const Fault& fault) {
  LS_ASSIGN_OR_RETURN(auto kind, kind_of(fault.kind));
  PlannedFault planned{.kind = kind, .step = fault.step};
  const KindInfo& info = info_of(kind);
  bool has_number = info.number.empty() || is_abort(kind);
  for (const auto& [name, value] : fault.arguments) {
    if (info.lasts && name == "steps") {
      planned.steps = value;
    } else if (!info.number.empty() && name == info.number) {
      planned.number = value;
      has_number = true;
    } else {
      return fail("fault {} takes no argument {}", fault.kind, name);
    }
  }
  if (!has_number)
    return fail("fault {} in step {}: expected an argument {}", fault.kind, fault.step,
                info.number);
  return checked(planned, fmt::format("fault {}", fault.kind));
}

// Removes the number after `mark` from the end of `text`; absent: `text` has no mark.
Result<std::optional<std::int64_t>> take_number(std::string_view& text, char mark) {
  const std::size_t at = text.rfind(mark);
  if (at == std::string_view::npos) return std::nullopt;
  std::int64_t value = 0;
  const char* const end = text.data() + text.size();
  const auto [behind, error] = std::from_chars(text.data() + at + 1, end, value);
  if (error != std::errc() || behind != end)
    return fail("{}: expected a number after {}", text, mark);
  text = text.substr(0, at);
  return value;
}

Result<PlannedFault> planned(std::string_view text) {
  std::string_view rest = text;
  Fault fault;
  // From right to left, so each mark is the last one left: "pinch_pool@20+8:4" loses ":4", "+8",
  // "@20".
  std::optional<std::int64_t> parts[3];  // after ':', '+' and '@'
  for (std::size_t i = 0; i < 3; ++i) {
    LS_ASSIGN_OR_RETURN(parts[i], take_number(rest, ":+@"[i]));
  }
  if (!parts[2])
    return fail("{}: expected KIND@STEP[+STEPS][:NUMBER], such as abort_decode@12", text);
  fault.kind = rest;
  fault.step = *parts[2];
  if (parts[1]) fault.arguments.emplace_back("steps", *parts[1]);
  LS_ASSIGN_OR_RETURN(const auto kind, kind_of(rest));
  if (parts[0]) {
    const std::string_view name = info_of(kind).number;
    if (name.empty()) return fail("{}: {} takes no number", text, rest);
    fault.arguments.emplace_back(name, *parts[0]);
  }
  return planned(fault);
}

}  // namespace

std::string_view name_of(FaultKind kind) { return info_of(kind).name; }

bool is_abort(FaultKind kind) { return kind >= FaultKind::abort_waiting; }

bool FaultPlan::is_active(FaultKind kind, std::int64_t step) const {
  return std::ranges::any_of(faults_, [&](const PlannedFault& fault) {
    return fault.kind == kind && fault.is_active(step);
  });
}

std::int64_t FaultPlan::blocks_in_use_max(std::int64_t step) const {
  std::int64_t most = std::numeric_limits<std::int64_t>::max();
  for (const PlannedFault& fault : faults_) {
    if (!fault.is_active(step)) continue;
    if (fault.kind == FaultKind::refuse_allocation) most = 0;
    if (fault.kind == FaultKind::pinch_pool) most = std::min(most, fault.number);
  }
  return most;
}

Result<FaultPlan> fault_plan_of(std::span<const Fault> faults) {
  std::vector<PlannedFault> plan;
  for (const Fault& fault : faults) {
    LS_ASSIGN_OR_RETURN(const auto one, planned(fault));
    plan.push_back(one);
  }
  return FaultPlan(std::move(plan));
}

std::vector<Fault> faults_of(const FaultPlan& plan) {
  std::vector<Fault> faults;
  for (const PlannedFault& planned : plan.faults()) {
    Fault& fault = faults.emplace_back();
    fault.kind = name_of(planned.kind);
    fault.step = planned.step;
    const KindInfo& info = info_of(planned.kind);
    if (info.lasts) fault.arguments.emplace_back("steps", planned.steps);
    if (!info.number.empty()) fault.arguments.emplace_back(info.number, planned.number);
  }
  return faults;
}

Result<FaultPlan> fault_plan_from_text(std::string_view text) {
  std::vector<PlannedFault> plan;
  while (true) {
    const std::size_t comma = text.find(',');
    LS_ASSIGN_OR_RETURN(const auto one, planned(text.substr(0, comma)));
    plan.push_back(one);
    if (comma == std::string_view::npos) return FaultPlan(std::move(plan));
    text.remove_prefix(comma + 1);
  }
}

std::string to_text(const PlannedFault& fault) {
  const KindInfo& info = info_of(fault.kind);
  std::string text = fmt::format("{}@{}", info.name, fault.step);
  if (info.lasts) text += fmt::format("+{}", fault.steps);
  if (!info.number.empty()) text += fmt::format(":{}", fault.number);
  return text;
}

// Duration of a step with a late output, 200 ms: twenty short steps of the default StepTimeModel
// (10 ms each). Requests that arrive meanwhile are in the queue when the output arrives.
constexpr std::int64_t kLateNs = 200'000'000;

static bool limits_pool(FaultKind kind) {
  return kind == FaultKind::refuse_allocation || kind == FaultKind::pinch_pool;
}

FaultyWorkload::FaultyWorkload(std::unique_ptr<Workload> inner, FaultPlan plan)
    : inner_(std::move(inner)), plan_(std::move(plan)) {
  for (const PlannedFault& fault : plan_.faults()) {
    if (is_abort(fault.kind)) aborts_.push_back(fault);
    limits_pool_ |= limits_pool(fault.kind);
  }
  looks_at_requests_ = !aborts_.empty();
}

Result<Turn> FaultyWorkload::next_turn(const LoopState& state, std::vector<WorkloadEvent>& events) {
  LS_CHECK(scheduler_ != nullptr || plan_.empty(), "faults without a scheduler to watch");
  step_ = state.step;
  for (const PlannedFault& fault : plan_.faults())
    if (limits_pool(fault.kind) && fault.is_active(step_)) count(fault.kind);
  // Set in every step, so the limit also ends by itself: invariant (2) of the header.
  if (limits_pool_) scheduler_->limit_blocks_in_use(plan_.blocks_in_use_max(step_));
  LoopState seen = state;
  // The previous step may have been idle because of a fault that ended with it. Only an idle step
  // without a fault proves that nothing can run.
  seen.idle &= !hinders(step_) && !hinders(step_ - 1);
  const std::size_t before = events.size();
  auto turn = inner_->next_turn(seen, events);
  if (!turn || *turn != Turn::step || !looks_at_requests_) return turn;
  // Only events of this turn: `events` may have had others.
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
      // Counts chunks: the first step after admission is the first chunk.
      ++requests_.find(row.name)->second.num_steps;
    }
  return inner_->sample(step, rows, output);
}

void FaultyWorkload::while_running(std::vector<WorkloadEvent>& events) {
  inner_->while_running(events);
  if (looks_at_requests_) abort_due(true, events);
}

std::optional<bool> FaultyWorkload::output_comes_in(std::int64_t step) const {
  // A recording decides first: its outputs arrive when they were recorded.
  const auto inner = inner_->output_comes_in(step);
  if (inner) return inner;
  if (!plan_.is_active(FaultKind::early_output, step_)) return std::nullopt;
  // The loop may ask several times for the output of one step.
  if (std::exchange(last_early_, step) != step) count(FaultKind::early_output);
  return true;
}

void FaultyWorkload::step_done(std::int64_t scheduled_tokens) {
  const std::int64_t began_ns = inner_->now_ns();
  inner_->step_done(scheduled_tokens);
  // An empty step has no output that could be late.
  if (scheduled_tokens == 0 || !plan_.is_active(FaultKind::late_output, step_)) return;
  inner_->advance_to(began_ns + kLateNs);
  count(FaultKind::late_output);
}

void FaultyWorkload::request_left(std::string_view name, std::uint64_t ticket) {
  if (looks_at_requests_) {
    // Kept for one step: abort_again reaches the engine after the request's end.
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
  const RequestStatus status = scheduler_->status(id);
  switch (kind) {
    // Phases outside the running queue follow from the status.
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
  const std::string_view name = scheduler_->name(id);
  if (kind == FaultKind::abort_in_flight)
    return std::ranges::find(in_step_, name) != in_step_.end();
  const Progress& progress = requests_.find(name)->second;
  // Also true in a step whose chunk completes the prompt: its output is the first token.
  if (scheduler_->num_computed_tokens(id) >= progress.num_prompt_tokens)
    return kind == FaultKind::abort_decode;
  return kind ==
         (progress.num_steps <= 1 ? FaultKind::abort_first_chunk : FaultKind::abort_mid_prefill);
}

std::vector<std::string> FaultyWorkload::in_phase(FaultKind kind) const {
  if (kind == FaultKind::abort_again) return left_before_;
  std::vector<std::string> names;
  const auto take = [&](RequestId id) {
    if (is_in_phase(id, kind)) names.emplace_back(scheduler_->name(id));
  };
  for (const RequestId id : scheduler_->running()) take(id);
  for (const SkippedRequest& request : scheduler_->skipped()) take(request.id);
  for (const RequestId id : scheduler_->waiting()) take(id);
  return names;
}

// Every abort takes another request, so two aborts of one step do not hit the same one. An abort
// without a request in its phase stays due. abort_in_flight happens after the decision, all others
// before it.
void FaultyWorkload::abort_due(bool in_flight, std::vector<WorkloadEvent>& events) {
  // A preempted request starts its prefill again: its chunks count from its next admission.
  for (const SkippedRequest& request : scheduler_->skipped())
    if (scheduler_->status(request.id) == RequestStatus::preempted)
      requests_.find(scheduler_->name(request.id))->second.num_steps = 0;
  for (const RequestId id : scheduler_->waiting())
    if (scheduler_->status(id) == RequestStatus::preempted)
      requests_.find(scheduler_->name(id))->second.num_steps = 0;
  // The workload's own aborts of this step also count.
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
  LS_ASSIGN_OR_RETURN(auto plan, fault_plan_of(faults));
  if (!plan.empty() && inner->is_scripted())
    return fail(
        "faults with recorded steps: the recording has its own events; expected a trace, or no "
        "faults");
  return std::make_unique<FaultyWorkload>(std::move(inner), std::move(plan));
}

}  // namespace lockstep
