// Makes random choices from a seed.
//
// Invariants
// (1) The same seed gives the same choices on every machine and with every compiler.
// (2) A choice uses integers only; std distributions differ between standard libraries.
#pragma once

#include <cstdint>
#include <string_view>

#include "base/check.h"

namespace lockstep {

// Sebastiano Vigna's splitmix64: one step from state x. It is the mixing function of every seeded
// choice, content id and recorded token, and the Python recorder implements it too
// (python/lockstep_engines/prompts.py). It must never change.
constexpr std::uint64_t splitmix64(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

// A stream of choices: splitmix64 of a counter. Copies continue independently from the same
// position.
class SeededRandom {
 public:
  explicit SeededRandom(std::uint64_t seed) : state_(splitmix64(seed)) {}
  // A stream of its own for a name. Choices that another stream makes, however many, do not change
  // it, so a new property of a generator does not change the others.
  SeededRandom(std::uint64_t seed, std::string_view name) : SeededRandom(seed) {
    for (const char c : name) state_ = splitmix64(state_ ^ static_cast<unsigned char>(c));
  }

  // Returns the next 64 bits.
  std::uint64_t next() { return splitmix64(state_++); }
  // Returns one of 0 .. bound - 1. The remainder favours small results by less than bound / 2^64.
  // REQUIRES: bound > 0.
  std::int64_t below(std::int64_t bound) {
    LS_CHECK(bound > 0, "a choice among {}", bound);
    return static_cast<std::int64_t>(next() % static_cast<std::uint64_t>(bound));
  }
  // Returns one of low .. high, both included. REQUIRES: low <= high, and high - low + 1 fits into
  // int64_t.
  std::int64_t between(std::int64_t low, std::int64_t high) { return low + below(high - low + 1); }
  // True in `percent` of 100 cases; always uses one choice, also for 0 and 100.
  bool chance(std::int32_t percent) { return below(100) < percent; }

 private:
  std::uint64_t state_;
};

}  // namespace lockstep
