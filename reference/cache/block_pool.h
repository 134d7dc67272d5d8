// The pool of blocks: which blocks are free, how many requests share a block, what a lookup can
// still hit.
//
// Invariants
// (1) Block 0 is the null block: never in the free queue, never cached. Its reference count has no
//     meaning.
// (2) Every other block with ref_cnt 0 is in the free queue exactly once. No block with ref_cnt > 0
//     is in the queue.
// (3) The pool allocates from the front of the queue. A freed block joins at the back and keeps its
//     cached content until it is allocated again. With FreedBlocks::unhashed_first, the uncached
//     blocks of one call join at the front. Both ends keep the caller's order.
// (4) An unpinned block stays watched after a touch; on_reuse() reports its next new holder.
//
// Not checked here: which request holds a block. The managers track that.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "base/check.h"
#include "base/ids.h"
#include "reference/cache/block_hash.h"
#include "reference/cache/cache_events.h"
#include "reference/profiles/engine_profile.h"
#include "reference/types/scheduler_types.h"

namespace lockstep {

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
  BlockKey key_of(BlockId block) const {
    const Entry& entry = entries_[block];
    LS_CHECK(entry.group != kNotCached, "block {} is not cached", index_of(block));
    const auto g = static_cast<std::uint64_t>(entry.group);
    return {entry.key.low - g * kOfGroupLow, entry.key.high ^ (g * kOfGroupHigh)};
  }
  std::int32_t num_tokens_of(BlockId block) const { return entries_[block].num_tokens; }
  std::int32_t group_of(BlockId block) const { return entries_[block].group; }

 private:
  static constexpr std::int32_t kNotCached = -1;
  static constexpr std::uint64_t kOfGroupLow = 0x9E3779B97F4A7C15ull;
  static constexpr std::uint64_t kOfGroupHigh = 0xD1342543DE82EF95ull;
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
    return {key.low + g * kOfGroupLow, key.high ^ (g * kOfGroupHigh)};
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

// The queue of free blocks: blocks join at either end, leave at the front, and may leave from the
// middle.
//
// A ring of positions instead of vLLM's linked list: the next blocks to leave are adjacent in
// memory, so upcoming() can prefetch what their eviction touches.
//
// Invariants
// (1) ring_[place_[b]] is b for every block in the queue. A position that a block has left from the
//     middle holds the null block until the front or compact() passes it.
// (2) The ring has twice the pool's capacity, so compact() drops a pool's worth of empty positions
//     each time: joining is amortized O(1).
//
// Not checked here: that a block joins once. The pool's ref_cnt ensures it.

class FreeQueue {
 public:
  // Blocks 1 .. num_blocks - 1 in this order.
  explicit FreeQueue(std::int64_t num_blocks);

  std::int64_t size() const { return size_; }
  BlockId pop_front();  // REQUIRES: size() > 0
  void push_back(BlockId block);
  void push_front(BlockId block);
  void remove(BlockId block);  // REQUIRES: it is in the queue

  // A block about `distance` pops away, or any other block: a hint.
  BlockId upcoming(std::uint32_t distance) const { return ring_[(front_ + distance) & mask_]; }
  std::vector<BlockId> in_order() const;  // front first

 private:
  void put(std::uint32_t place, BlockId block) {
    ring_[place & mask_] = block;
    place_[block] = place;
  }
  bool is_full() const { return end_ - front_ == ring_.size(); }
  void compact();

  std::vector<BlockId> ring_;
  IdVector<BlockId, std::uint32_t> place_;
  std::uint32_t mask_;
  // Places count on and wrap around at 2^32, which the ring's length divides.
  std::uint32_t front_ = 0;
  std::uint32_t end_ = 0;
  std::int64_t size_ = 0;
};

class BlockPool {
 public:
  // REQUIRES: num_blocks >= 1.
  BlockPool(std::int64_t num_blocks, bool enable_caching, FreedBlocks freed_blocks);

  virtual ~BlockPool() = default;

  bool is_caching() const { return enable_caching_; }
  std::int64_t num_blocks() const { return std::ssize(ref_cnts_); }
  std::int64_t num_free_blocks() const { return free_.size(); }
  std::int32_t ref_cnt(BlockId block) const {
    check_block(block);
    return ref_cnts_[block];
  }
  // In the free queue, and not the null block.
  bool is_evictable(BlockId block) const { return block != kNullBlock && ref_cnt(block) == 0; }

  std::vector<BlockId> free_queue() const { return free_.in_order(); }  // front first

  // Limits the blocks in use from now on, whatever the size of the pool: a pool that has lost a
  // part of its blocks. Blocks already in use above the limit stay allocated.
  void limit_blocks_in_use(std::int64_t num_blocks) { in_use_max_ = num_blocks; }
  // Whether `count` blocks more may be in use now. Counts what the limit alone refuses.
  bool can_give(std::int64_t count);

  // Appends `count` blocks from the front of the queue to `out`; what they had cached is evicted.
  // REQUIRES: count <= num_free_blocks().
  void get_new_blocks(std::int64_t count, std::vector<BlockId>& out);
  // A prefix hit: one more holder of each block. Null blocks are passed over.
  void touch(std::span<const BlockId> blocks);
  // One holder fewer of each; those without any join the queue. Null blocks are passed over.
  // `of_window`: attention has left them behind, or they are a window's.
  void free_blocks(std::span<const BlockId> blocks, bool of_window = false);
  void free_blocks_reversed(std::span<const BlockId> blocks, bool of_window = false);

  // Removes one reference per block. Blocks without references join the back of the queue, cached
  // or not. The callback of on_reuse() may read them until they are allocated or the cache is
  // reset.
  void unpin_blocks(std::span<const BlockId> blocks);
  void on_reuse(std::function<void(BlockId)> told);

  // Makes a full block's content findable, a prefix of `num_tokens`. Keys of its parts go.
  void cache_block(BlockId block, const BlockKey& key, std::int32_t group,
                   std::int32_t num_tokens = 0);
  // Makes the content of a block's first part findable, the end of a prefix of `num_tokens`. Keys
  // of shorter prefixes go; with `replaces` all keys, since the block holds something else now.
  // False: it was there.
  bool cache_part_of_block(BlockId block, const BlockKey& key, std::int32_t group,
                           std::int32_t num_tokens, bool replaces = false);
  // What `from` holds will be copied to `to`, and is found there from now on.
  void move_keys(BlockId from, BlockId to);
  // Removes the keys of blocks whose content no longer matches them: no lookup can hit them.
  void evict_blocks(std::span<const BlockId> blocks);
  // True if a prefix can hit the block. REQUIRES: the block is one of the pool's.
  bool is_cached(BlockId block) const {
    check_block(block);
    return enable_caching_ && cache_.contains(block);
  }
  // The entries of cached blocks. REQUIRES: the pool caches; without caching it has no entries.
  const PrefixCache& cache() const {
    LS_CHECK(enable_caching_, "a pool without caching has no cache entries");
    return cache_;
  }
  // False, and nothing changed, while any block is in use.
  bool reset_prefix_cache();

  CacheCounters take_counters();

  // From now on events are kept; events() is null before.
  void keep_events() { events_ = std::make_unique<CacheEventLog>(); }
  CacheEventLog* events() { return events_.get(); }

 protected:
  // What the block held is not findable once it has a new holder.
  virtual void hand_out(BlockId block) { evict(block); }

 private:
  // Ids come from other classes, and from pools of another size.
  void check_block(BlockId block) const {
    LS_CHECK(index_of(block) >= 0 && index_of(block) < num_blocks(), "block {} in a pool of {}",
             index_of(block), num_blocks());
  }
  template <typename Iterator>
  void release(Iterator begin, Iterator end, bool unhashed_first);
  void evict(BlockId block);
  void prefetch_evictions() const;

  void note_reuse(BlockId block);

  IdVector<BlockId, std::int32_t> ref_cnts_;
  FreeQueue free_;
  std::vector<BlockId> unhashed_;  // of one call of release()
  std::int64_t in_use_max_ = std::numeric_limits<std::int64_t>::max();
  bool enable_caching_;
  bool unhashed_first_;
  bool unhashed_of_windows_first_;
  PrefixCache cache_;
  CacheCounters counters_;
  std::unique_ptr<CacheEventLog> events_;
  std::function<void(BlockId)> reused_;  // null: no caller unpins
  std::vector<bool> is_watched_;         // by block
};

}  // namespace lockstep
