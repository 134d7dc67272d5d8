// The prefix cache: from the hash of a block's content to the blocks that hold it, per group.
//
// Several blocks may hold the same content (requests that computed it side by side); a lookup gives
// the one that was added first and is still there, as vLLM's BlockHashToBlockMap does.
//
// Invariants
// (1) A block is in the cache at most once, under the key that key_of() tells.
// (2) A chain holds the blocks of one bucket in the order in which they were added; the `previous`
//     of its first block is its last, so that adding and removing are O(1) however many blocks
//     hold one key.
// (3) There are at least two buckets a block, of four bytes: most chains have one block, and the
//     table of a large pool stays in the processor's caches.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "base/ids.h"
#include "reference/cache/block_hash.h"

namespace lockstep {

// What a block holds, as a lookup asks for it.
struct CachedBlock {
  BlockKey key;
  std::int32_t group = 0;
  bool operator==(const CachedBlock&) const = default;
};

class PrefixCache {
 public:
  explicit PrefixCache(std::int64_t num_blocks);

  // The first block that holds `key` for `group`, or the null block.
  BlockId find(const BlockKey& key, std::int32_t group) const;
  // True when some block was added under `key` since the last call of begin_step().
  bool added_this_step(const BlockKey& key, std::int32_t group) const;
  void begin_step() { ++step_; }

  // REQUIRES: the block is not in the cache.
  void add(BlockId block, const BlockKey& key, std::int32_t group);
  // False: the block was not in the cache.
  bool remove(BlockId block);
  void clear();

  bool contains(BlockId block) const { return entries_[block].group != kNotCached; }
  // Brings what remove(block) will touch nearer to the processor: first the entry, then the bucket.
  void prefetch_entry(BlockId block) const { __builtin_prefetch(&entries_[block]); }
  void prefetch_bucket(BlockId block) const {
    __builtin_prefetch(&firsts_[bucket_of(entries_[block].key)]);
  }
  // The same for find() and add().
  void prefetch(const BlockKey& key, std::int32_t group) const {
    __builtin_prefetch(&firsts_[bucket_of(mixed(key, group))]);
  }

  // The key and group of a cached block, for events. REQUIRES: contains(block).
  BlockKey key_of(BlockId block) const;
  std::int32_t group_of(BlockId block) const { return entries_[block].group; }

 private:
  static constexpr std::int32_t kNotCached = -1;
  struct Entry {   // one a block, half a cache line
    BlockKey key;  // already mixed with the group
    BlockId previous{};
    BlockId next{};  // the null block: none
    std::int32_t group = kNotCached;
    std::uint32_t added_in_step = 0;
  };
  std::size_t bucket_of(const BlockKey& mixed_key) const { return mixed_key.low & mask_; }
  static BlockKey mixed(const BlockKey& key, std::int32_t group) {
    const auto g = static_cast<std::uint64_t>(group);
    return {key.low + g * 0x9E3779B97F4A7C15ull, key.high ^ (g * 0xD1342543DE82EF95ull)};
  }
  BlockId first_of(const BlockKey& mixed_key, BlockId from) const;

  IdVector<BlockId, Entry> entries_;
  std::vector<BlockId> firsts_;  // of the chain of each bucket; the null block: empty
  std::size_t mask_ = 0;
  std::uint32_t step_ = 1;
};

}  // namespace lockstep
