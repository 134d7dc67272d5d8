#include "sim/engine/step_observer.h"

#include <algorithm>

#include "base/names.h"

namespace lockstep {

bool ObserverList::decided(const StepView& view) {
  return std::ranges::all_of(observers_, [&](auto* observer) { return observer->decided(view); });
}

bool ObserverList::finished(const StepView& view) {
  bool go_on = true;
  for (StepObserver* observer : observers_) go_on &= observer->finished(view);
  return go_on;
}

void ObserverList::arrived(const Arrival& arrival) {
  for (StepObserver* observer : observers_) observer->arrived(arrival);
}

void ObserverList::left(RequestId request, FinishReason reason) {
  for (StepObserver* observer : observers_) observer->left(request, reason);
}

namespace {

constexpr auto kReasons = std::to_array<Named<FinishReason>>({
    {FinishReason::stop, "stop"},
    {FinishReason::length, "length"},
    {FinishReason::abort, "abort"},
    {FinishReason::repetition, "repetition"},
    {FinishReason::error, "error"},
});

}  // namespace

std::string_view name_of(FinishReason reason) { return name_in(kReasons, reason); }
std::optional<FinishReason> finish_reason_from_name(std::string_view name) {
  return value_in(kReasons, name);
}

}  // namespace lockstep
