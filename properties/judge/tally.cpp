#include "properties/judge/tally.h"

#include <algorithm>

namespace lockstep {

std::vector<Reached> classes_of_connectors() {
  std::vector<Reached> classes;
  for (std::size_t i = 0; i < kNumReached; ++i)
    if (kReachedClasses[i].seen_with == SeenWith::connector)
      classes.push_back(static_cast<Reached>(i));
  return classes;
}

Tally& Tally::operator+=(const Tally& other) {
  for (std::size_t i = 0; i < kNumReached; ++i) counts_[i] += other.counts_[i];
  return *this;
}

std::vector<std::string_view> Tally::missing() const {
  const bool any_backend = (*this)[Reached::with_backend] > 0;
  bool any_device_mode = false;
  for (std::size_t i = 0; i < kNumReached; ++i)
    any_device_mode |= counts_[i] > 0 && kReachedClasses[i].seen_with == SeenWith::device_mode;
  std::vector<std::string_view> names;
  for (std::size_t i = 0; i < kNumReached; ++i) {
    const auto [name, seen_with] = kReachedClasses[i];
    const bool can_be_seen = seen_with == SeenWith::backend       ? any_backend
                             : seen_with == SeenWith::device_mode ? any_device_mode
                                                                  : true;
    if (counts_[i] == 0 && can_be_seen) names.push_back(name);
  }
  return names;
}

}  // namespace lockstep
