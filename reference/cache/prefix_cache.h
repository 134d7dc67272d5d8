// The prefix cache: from the hash of a block's content to the blocks that hold it, per group.
//
// Several blocks may hold the same content (requests that computed it side by side); a lookup gives
// the one that was added first and is still there, as vLLM's BlockHashToBlockMap does.
//
// A block has a first key, which key_of() tells, and may have further ones: its first part is then
// what other prefixes end with. All go together.
//
// Invariants
// (1) A block is in the cache at most once under one key, and has further keys only with a first.
// (2) A chain holds the entries of one bucket in the order in which they were added; the `previous`
//     of its first entry is its last, so that adding and removing are O(1) however many blocks
//     hold one key.
// (3) There are at least two buckets a block, of four bytes: most chains have one block, and the
//     table of a large pool stays in the processor's caches.
// (4) Entry b is block b's first; those of further keys follow behind the pool's.
#pragma once

#include <cstdint>
#include <map>
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
  bool has_key(BlockId block, const BlockKey& key, std::int32_t group) const;

  // The first key of a block, which covers `num_tokens` of a prefix. REQUIRES: the block is not in
  // the cache.
  void add(BlockId block, const BlockKey& key, std::int32_t group, std::int32_t num_tokens = 0);
  // A further key. REQUIRES: the block is in the cache, and not under this one.
  void add_further(BlockId block, const BlockKey& key, std::int32_t group);
  // Takes all its keys away, and says how many there were.
  std::int64_t remove(BlockId block);
  // `to` has the keys of `from`, in their order. REQUIRES: it had none.
  void move_keys(BlockId from, BlockId to);
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

  // Of the first key of a cached block. REQUIRES: contains(block).
  BlockKey key_of(BlockId block) const;
  std::int32_t num_tokens_of(BlockId block) const { return entries_[block].num_tokens; }
  std::int32_t group_of(BlockId block) const { return entries_[block].group; }

 private:
  static constexpr std::int32_t kNotCached = -1;
  struct Entry {   // one a block, half a cache line
    BlockKey key;  // already mixed with the group
    BlockId previous{};
    BlockId next{};  // the null block: none
    std::int32_t group = kNotCached;
    std::int32_t num_tokens = 0;
  };
  std::size_t bucket_of(const BlockKey& mixed_key) const { return mixed_key.low & mask_; }
  static BlockKey mixed(const BlockKey& key, std::int32_t group) {
    const auto g = static_cast<std::uint64_t>(group);
    return {key.low + g * 0x9E3779B97F4A7C15ull, key.high ^ (g * 0xD1342543DE82EF95ull)};
  }
  BlockId first_of(const BlockKey& mixed_key, BlockId from) const;
  BlockId block_of(BlockId entry) const {
    const auto further = index_of(entry) - num_blocks_;
    return further < 0 ? entry : owners_[static_cast<std::size_t>(further)];
  }
  void link(BlockId entry);
  void unlink(BlockId entry);

  std::int64_t num_blocks_;
  IdVector<BlockId, Entry> entries_;
  std::vector<BlockId> owners_;                      // of the entries of further keys
  std::vector<BlockId> spare_entries_;               // among these
  std::map<BlockId, std::vector<BlockId>> further_;  // entries of a block, in order
  std::vector<BlockId> firsts_;  // of the chain of each bucket; the null block: empty
  std::size_t mask_ = 0;
};

}  // namespace lockstep
