// A generator of choices for what is simulated: the same seed, the same choices, on any machine.
#pragma once

#include <cstdint>
#include <string_view>

#include "base/check.h"
#include "base/splitmix64.h"

namespace lockstep {

class SeededRandom {
 public:
  explicit SeededRandom(std::uint64_t seed) : state_(splitmix64(seed)) {}
  // An independent stream for a name: other streams and their length do not change it.
  SeededRandom(std::uint64_t seed, std::string_view name) : SeededRandom(seed) {
    for (const char c : name) state_ = splitmix64(state_ ^ static_cast<unsigned char>(c));
  }

  std::uint64_t next() { return splitmix64(state_++); }
  // One of 0 .. bound - 1. REQUIRES: bound > 0.
  std::int64_t below(std::int64_t bound) {
    LS_CHECK(bound > 0, "a choice among {}", bound);
    return static_cast<std::int64_t>(next() % static_cast<std::uint64_t>(bound));
  }
  // One of low .. high, both included.
  std::int64_t between(std::int64_t low, std::int64_t high) { return low + below(high - low + 1); }
  bool chance(std::int32_t percent) { return below(100) < percent; }

 private:
  std::uint64_t state_;
};

}  // namespace lockstep
