#include "sim/ranks/dealt_workload.h"

#include <algorithm>

namespace lockstep {

void DealtWorkload::deal(WorkloadEvent event) {
  if (event.kind == WorkloadEvent::Kind::add) {
    std::erase(left_before_, event.request.name);  // one of that name has left, and here is another
    names_.insert(event.request.name);
  }
  dealt_.push_back(std::move(event));
}

std::int64_t DealtWorkload::num_dealt_requests() const {
  return std::ranges::count(dealt_, WorkloadEvent::Kind::add, &WorkloadEvent::kind);
}

Result<Turn> DealtWorkload::next_turn(const LoopState&, std::vector<WorkloadEvent>& events) {
  std::ranges::move(std::exchange(dealt_, {}), std::back_inserter(events));
  return Turn::step;
}

void DealtWorkload::request_left(std::string_view name, std::uint64_t ticket) {
  left_.emplace_back(name, ticket);
}

void DealtWorkload::advance_to(std::int64_t now_ns) { until_ns_ = std::max(until_ns_, now_ns); }

void DealtWorkload::pass_on() {
  all_.advance_to(until_ns_);
  for (const std::string& name : std::exchange(left_before_, {})) names_.erase(name);
  for (auto& [name, ticket] : std::exchange(left_, {})) {
    all_.request_left(name, ticket);
    left_before_.push_back(std::move(name));
  }
}

}  // namespace lockstep
