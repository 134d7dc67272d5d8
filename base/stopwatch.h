// Measures seconds between laps.
//
// Invariants
// (1) Times are only reported. No decision, hash or comparison uses them.
#pragma once

#include <chrono>
#include <utility>

namespace lockstep {

class Stopwatch {
 public:
  // Returns the seconds since the previous lap, or since construction for the first.
  double lap() {
    const auto now = std::chrono::steady_clock::now();
    return std::chrono::duration<double>(now - std::exchange(last_, now)).count();
  }

 private:
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

}  // namespace lockstep
