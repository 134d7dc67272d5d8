// The chain of state hashes: 128 bits that every step's decisions and expectations extend. Two runs
// with equal chains at a step have agreed in everything that was put in up to there.
//
// Order matters, and so does what is absent: lists go in with their length.
#pragma once

#include <bit>
#include <cstdint>
#include <span>
#include <string_view>

#include "reference/memory/content.h"
#include "reference/types/scheduler_types.h"
#include "sim/verdict/run_summary.h"

namespace lockstep {

class StateHashChain {
 public:
  void add(std::uint64_t value) {
    low_ = mix(low_ ^ value);
    high_ = (high_ + std::rotl(low_, 31)) * kStateStep + value;
  }
  void add(std::string_view text) {
    add(text.size());
    std::uint64_t word = 0;
    for (std::size_t i = 0; i < text.size(); ++i) {
      word = word << 8 | static_cast<unsigned char>(text[i]);
      if (i % 8 == 7) add(word);
    }
    add(word);
  }
  void add(const SchedulerOutput& decision);
  StateHash value() const { return {mix(high_), low_}; }

 private:
  std::uint64_t high_ = 0x6C6F636B73746570ull;
  std::uint64_t low_ = 0x636861696E6F6620ull;
};

}  // namespace lockstep
