#include "sim/engine/fault_plan.h"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <utility>

namespace lockstep {
namespace {

constexpr std::int64_t kStepMax = std::int64_t{1} << 40;
// So long that nobody gets on, and so short that a run does not wait for it.
constexpr std::int64_t kStepsMax = 1'000;

struct KindInfo {
  std::string_view name;
  bool lasts = false;            // takes `steps`
  std::string_view number = {};  // the other argument it takes; empty: none
};

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
  std::string known;
  for (const KindInfo& each : kKinds)
    known += fmt::format("{}{}", known.empty() ? "" : ", ", each.name);
  return fail(fmt::format("no fault is called {}; expected one of {}", name, known));
}

// Every number in its range; `what` names the fault in the message.
Result<PlannedFault> checked(const PlannedFault& fault, std::string_view what) {
  if (fault.step < 0 || fault.step > kStepMax)
    return fail(fmt::format("{}: step {}; expected 0 to {}", what, fault.step, kStepMax));
  if (fault.steps < 1 || fault.steps > kStepsMax)
    return fail(fmt::format("{}: {} steps; expected 1 to {}", what, fault.steps, kStepsMax));
  if (fault.number < 0)
    return fail(fmt::format("{}: {} is negative; expected {} of 0 or more", what, fault.number,
                            info_of(fault.kind).number));
  return fault;
}

Result<PlannedFault> planned(const Fault& fault) {
  const Result<FaultKind> kind = kind_of(fault.kind);
  if (!kind) return tl::unexpected(kind.error());
  PlannedFault planned{.kind = *kind, .step = fault.step};
  const KindInfo& info = info_of(*kind);
  bool has_number = info.number.empty() || is_abort(*kind);
  for (const auto& [name, value] : fault.arguments) {
    if (info.lasts && name == "steps") {
      planned.steps = value;
    } else if (!info.number.empty() && name == info.number) {
      planned.number = value;
      has_number = true;
    } else {
      return fail(fmt::format("fault {} takes no argument {}", fault.kind, name));
    }
  }
  if (!has_number)
    return fail(fmt::format("fault {} in step {}: expected an argument {}", fault.kind, fault.step,
                            info.number));
  return checked(planned, fmt::format("fault {}", fault.kind));
}

// A number behind `mark`, taken off the end of `text`; nothing: there is no mark.
Result<std::optional<std::int64_t>> take_number(std::string_view& text, char mark) {
  const std::size_t at = text.rfind(mark);
  if (at == std::string_view::npos) return std::nullopt;
  std::int64_t value = 0;
  const char* const end = text.data() + text.size();
  const auto [behind, error] = std::from_chars(text.data() + at + 1, end, value);
  if (error != std::errc() || behind != end)
    return fail(fmt::format("{}: expected a number behind {}", text, mark));
  text = text.substr(0, at);
  return value;
}

Result<PlannedFault> planned(std::string_view text) {
  std::string_view rest = text;
  Fault fault;
  std::optional<std::int64_t> parts[3];  // behind ':', '+' and '@'
  for (std::size_t i = 0; i < 3; ++i) {
    auto number = take_number(rest, ":+@"[i]);
    if (!number) return tl::unexpected(number.error());
    parts[i] = *number;
  }
  if (!parts[2])
    return fail(
        fmt::format("{}: expected KIND@STEP[+STEPS][:NUMBER], such as abort_decode@12", text));
  fault.kind = rest;
  fault.step = *parts[2];
  if (parts[1]) fault.arguments.emplace_back("steps", *parts[1]);
  const Result<FaultKind> kind = kind_of(rest);
  if (!kind) return tl::unexpected(kind.error());
  if (parts[0]) {
    const std::string_view name = info_of(*kind).number;
    if (name.empty()) return fail(fmt::format("{}: {} takes no number", text, rest));
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
    const Result<PlannedFault> one = planned(fault);
    if (!one) return tl::unexpected(one.error());
    plan.push_back(*one);
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
    const Result<PlannedFault> one = planned(text.substr(0, comma));
    if (!one) return tl::unexpected(one.error());
    plan.push_back(*one);
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

}  // namespace lockstep
