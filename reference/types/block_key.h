// The name of a block's content in the prefix cache. reference/cache/block_hash.h makes it.
#pragma once

#include <cstdint>

namespace lockstep {

// What the prefix cache looks a block up by.
struct BlockKey {
  std::uint64_t low = 0;
  std::uint64_t high = 0;
  bool operator==(const BlockKey&) const = default;
};

}  // namespace lockstep
