// A generator of random choices.
//
// Invariants
// (1) The same seed gives the same choices on every machine.
#pragma once

#include <cstdint>
#include <string_view>

#include "base/check.h"

namespace lockstep {

// The mixing function behind every seeded choice, content id and recorded token; it never changes:
// Sebastiano Vigna's splitmix64, one step from state x. The recorder of vLLM uses the same.
constexpr std::uint64_t splitmix64(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

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
