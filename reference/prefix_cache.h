// The prefix cache: from the hash of a block's content to the blocks that hold it, per group.
//
// Several blocks may hold the same content (requests that computed it side by side); a lookup gives
// the one that was added first and is still there, as vLLM's BlockHashToBlockMap does.
//
// Invariants
// (1) A block is in the cache at most once, under the key that key_of() tells.
// (2) Blocks of one key are chained in the order in which they were added.
// (3) The table is never more than 2/3 full; a bucket is 16 bytes, so that the tables of large
//     pools stay in the processor's caches.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "reference/block_hash.h"
#include "reference/ids.h"

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

  bool contains(BlockId block) const { return entries_[at(block)].cached; }
  // Brings what remove(block) will touch nearer to the processor.
  void prefetch(BlockId block) const {
    const Entry& entry = entries_[at(block)];
    if (entry.cached) __builtin_prefetch(&buckets_[tag_of(entry.key) & mask_]);
  }
  void prefetch(const BlockKey& key, std::int32_t group) const {
    __builtin_prefetch(&buckets_[tag_of(mixed(key, group)) & mask_]);
  }
  void prefetch_entry(BlockId block) const { __builtin_prefetch(&entries_[at(block)]); }

  // The key and group of a cached block, for events. REQUIRES: contains(block).
  BlockKey key_of(BlockId block) const;
  std::int32_t group_of(BlockId block) const { return entries_[at(block)].group; }

 private:
  struct Entry {   // one a block
    BlockKey key;  // already mixed with the group
    BlockId previous{};
    BlockId next{};
    std::int32_t group = 0;
    bool cached = false;
  };
  struct Bucket {           // one a distinct key; open addressing, linear probing
    std::uint32_t tag = 0;  // low half of the key; the whole of it stands at `first`
    BlockId first{};        // the null block: the bucket is empty
    BlockId last{};
    std::uint32_t added_in_step = 0;
  };
  static std::size_t at(BlockId block) { return static_cast<std::size_t>(index_of(block)); }
  static std::uint32_t tag_of(const BlockKey& mixed_key) {
    return static_cast<std::uint32_t>(mixed_key.low);
  }
  static BlockKey mixed(const BlockKey& key, std::int32_t group) {
    const auto g = static_cast<std::uint64_t>(group);
    return {key.low + g * 0x9E3779B97F4A7C15ull, key.high ^ (g * 0xD1342543DE82EF95ull)};
  }
  std::size_t probe(const BlockKey& mixed_key) const;
  void erase_bucket(std::size_t hole);

  std::vector<Entry> entries_;
  std::vector<Bucket> buckets_;
  std::size_t mask_ = 0;
  std::uint32_t step_ = 1;
};

}  // namespace lockstep
