// The mixing function behind every seeded choice, content id and recorded token; it never changes.
#pragma once

#include <cstdint>

namespace lockstep {

// Sebastiano Vigna's splitmix64, one step from state x. The recorder of vLLM uses the same.
constexpr std::uint64_t splitmix64(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

}  // namespace lockstep
