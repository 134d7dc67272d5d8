// Which hash lies in which block of a host tier: a map with a limit, the least recently used first
// to go (vllm/v1/kv_offload/cpu/manager.py).
//
// 1. A key has one host block at most, a host block one key at most.
// 2. A block that is pinned, or not ready, is never given to another key.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "base/ids.h"
#include "reference/cache/block_hash.h"

namespace lockstep {

// A hash stands for a prefix; each group has blocks of its own for it.
struct HostKey {
  std::uint64_t high = 0, low = 0;
  std::int32_t group = 0;
  auto operator<=>(const HostKey&) const = default;
};

class HostBlockPool {
 public:
  explicit HostBlockPool(std::int64_t num_blocks);

  bool is_ready(const HostKey& key) const;  // false also for a key that has none
  bool contains(const HostKey& key) const { return entries_.contains(key); }
  // REQUIRES: is_ready(key).
  HostBlockId use(const HostKey& key);  // now the most recently used
  void pin(HostBlockId host);
  void unpin(HostBlockId host);

  // A block for a key that has none, not ready yet. Nothing: all others are in use.
  std::optional<HostBlockId> take(const HostKey& key);
  void set_ready(HostBlockId host);
  void drop(HostBlockId host);  // its store is not carried out
  std::int64_t num_evicted() const { return num_evicted_; }

 private:
  struct Block {
    std::optional<HostKey> key;
    bool ready = false;
    std::int32_t pins = 0;
    std::int64_t used = 0;  // when; by_use_ has it while nobody needs the block
  };
  Block& at(HostBlockId host);
  void allow_eviction(HostBlockId host);

  std::vector<Block> blocks_;
  std::vector<HostBlockId> free_;
  std::map<HostKey, HostBlockId> entries_;
  std::map<std::int64_t, HostBlockId> by_use_;  // ready and not pinned
  std::int64_t clock_ = 0;
  std::int64_t num_evicted_ = 0;
};

}  // namespace lockstep
