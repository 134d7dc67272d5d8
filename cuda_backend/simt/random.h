// The only source of choice in the executor: a seeded SplitMix64.
//
// Invariants:
// 1. The state depends only on the seed and the number of calls of next().
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "base/seeded_random.h"

namespace simt {

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  std::uint32_t next() {
    return static_cast<std::uint32_t>(
        lockstep::splitmix64(std::exchange(state_, state_ + 0x9e3779b97f4a7c15ull)) >> 16);
  }
  // Uniform enough in [0, bound), bound > 0.
  std::uint32_t below(std::uint32_t bound) {
    return static_cast<std::uint32_t>((std::uint64_t{next()} * bound) >> 32);
  }
  template <class T>
  void shuffle(std::vector<T>& items) {
    for (std::size_t i = items.size(); i > 1; --i)
      std::swap(items[i - 1], items[below(static_cast<std::uint32_t>(i))]);
  }

 private:
  std::uint64_t state_;
};

}  // namespace simt
