#include "sim/engine/step_observer.h"

#include <algorithm>

namespace lockstep {

bool ObserverList::decided(const StepView& view) {
  // Stops at the first false, since the step will not complete.
  return std::ranges::all_of(observers_, [&](auto* observer) { return observer->decided(view); });
}

bool ObserverList::finished(const StepView& view) {
  // All observers receive the finished step, also after a false: recorders must be complete.
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

}  // namespace lockstep
