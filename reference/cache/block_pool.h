// The pool of blocks: which blocks are free, how many requests share a block, which content a
// lookup can still hit. Source of the rules: vllm/v1/core/block_pool.py.
//
// Invariants
// (1) Block 0 is the null block: never in the free queue, never cached. Its reference count has no
//     meaning.
// (2) Every other block with ref_cnt 0 is in the free queue exactly once. No block with ref_cnt > 0
//     is in the queue.
// (3) The pool allocates from the front of the queue. A freed block joins at the back and keeps its
//     cached content until it is allocated again: the queue is the eviction order. With
//     FreedBlocks::unhashed_first, the uncached blocks of one call join at the front. Both ends
//     keep the caller's order.
// (4) An unpinned block stays watched after a touch; on_reuse() reports its next new holder.
// (5) Without caching the prefix cache has one entry and every lookup of it is a programmer's
//     error.
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

// The prefix cache: a map from the hash of a block's content, per group, to the blocks that hold
// it.
//
// Several blocks may hold the same content, if requests computed it in parallel. A lookup returns
// the one that was added first and is still cached, as vLLM's BlockHashToBlockMap does: blocks are
// not deduplicated, so block tables stay append-only.
//
// A block has a first key, which key_of() returns, and may have further keys for shorter prefixes
// that end inside it. Example: blocks of 64 tokens with hash blocks of 16, a first key of 32 tokens
// and a further key of 16. A removal removes all keys.
//
// Invariants
// (1) A block has each key at most once, and further keys only with a first one.
// (2) A chain holds the entries of one bucket in insertion order. The `previous` of its first entry
//     is its last entry, so adding and removing are O(1) however many blocks hold one key.
// (3) The table has at least two buckets per block, four bytes each: most chains have one block,
//     and the table of a large pool fits the processor's caches.
// (4) Entry b is the first entry of block b. The entries of further keys have ids from num_blocks
//     on.

// The content of a block as a lookup names it.
struct CachedBlock {
  BlockKey key;
  std::int32_t group = 0;
  bool operator==(const CachedBlock&) const = default;
};

// O(1) on average for every operation except move_keys() and clear(); no allocation except for
// further keys.
class PrefixCache {
 public:
  explicit PrefixCache(std::int64_t num_blocks);

  // The first block that holds `key` for `group`; the null block: none.
  BlockId find(const BlockKey& key, std::int32_t group) const;
  // True if `key` is the block's first key or one of its further keys.
  bool has_key(BlockId block, const BlockKey& key, std::int32_t group) const;

  // Adds the first key of a block; the key covers `num_tokens` tokens of a prefix. REQUIRES: the
  // block is not in the cache and not the null block.
  void add(BlockId block, const BlockKey& key, std::int32_t group, std::int32_t num_tokens = 0);
  // Adds a further key. REQUIRES: the block is in the cache and does not have this key.
  void add_further(BlockId block, const BlockKey& key, std::int32_t group);
  // Removes all keys of the block and returns their number; 0: it was not in the cache.
  std::int64_t remove(BlockId block);
  // Moves the keys of `from` to `to`, in their order. REQUIRES: `to` has no keys.
  void move_keys(BlockId from, BlockId to);
  // Removes every key of every block: O(num_blocks).
  void clear();

  bool contains(BlockId block) const { return entries_[block].group != kNotCached; }
  // Prefetches the memory that remove(block) will touch: first the entry, and once it has arrived
  // the bucket, whose address depends on the entry's key. Any block is valid: a hint.
  void prefetch_entry(BlockId block) const { __builtin_prefetch(&entries_[block]); }
  void prefetch_bucket(BlockId block) const {
    __builtin_prefetch(&firsts_[bucket_of(entries_[block].key)]);
  }
  // Prefetches the bucket that find() and add() will touch.
  void prefetch(const BlockKey& key, std::int32_t group) const {
    __builtin_prefetch(&firsts_[bucket_of(mixed(key, group))]);
  }

  // The first key of a cached block, without the group that it was mixed with. REQUIRES:
  // contains(block).
  BlockKey key_of(BlockId block) const {
    const Entry& entry = entries_[block];
    LS_CHECK(entry.group != kNotCached, "block {} is not cached", index_of(block));
    const auto g = static_cast<std::uint64_t>(entry.group);
    return {entry.key.low - g * kOfGroupLow, entry.key.high ^ (g * kOfGroupHigh)};
  }
  // Tokens of the prefix that the first key covers. Not a multiple of the block size if the key
  // covers only the block's first part. Meaningless unless contains(block).
  std::int32_t num_tokens_of(BlockId block) const { return entries_[block].num_tokens; }
  // The group of all keys of the block; kNotCached: not in the cache.
  std::int32_t group_of(BlockId block) const { return entries_[block].group; }

 private:
  static constexpr std::int32_t kNotCached = -1;
  // Odd constants that spread a group's number over both halves of a key. mixed() adds to one half
  // and xors the other; key_of() reverses both exactly.
  static constexpr std::uint64_t kOfGroupLow = 0x9E3779B97F4A7C15ull;
  static constexpr std::uint64_t kOfGroupHigh = 0xD1342543DE82EF95ull;
  struct Entry {   // 32 bytes, half a cache line
    BlockKey key;  // mixed with the group
    BlockId previous{};
    BlockId next{};  // the null block: the last of its chain
    std::int32_t group = kNotCached;
    std::int32_t num_tokens = 0;
  };
  std::size_t bucket_of(const BlockKey& mixed_key) const { return mixed_key.low & mask_; }
  // A key that differs for every group, so one table serves all groups without comparing them.
  static BlockKey mixed(const BlockKey& key, std::int32_t group) {
    const auto g = static_cast<std::uint64_t>(group);
    return {key.low + g * kOfGroupLow, key.high ^ (g * kOfGroupHigh)};
  }
  // The first entry at or after `from` in its chain with that key; the null block: none.
  BlockId first_of(const BlockKey& mixed_key, BlockId from) const;
  // The block that an entry belongs to: itself, or its owner if it is an entry of a further key.
  BlockId block_of(BlockId entry) const {
    const auto further = index_of(entry) - num_blocks_;
    return further < 0 ? entry : owners_[static_cast<std::size_t>(further)];
  }
  // Append an entry to the chain of its key's bucket, and take it out: O(1), invariant (2).
  void link(BlockId entry);
  void unlink(BlockId entry);

  std::int64_t num_blocks_;
  IdVector<BlockId, Entry> entries_;
  std::vector<BlockId> owners_;         // of the entries of further keys, from num_blocks_ on
  std::vector<BlockId> spare_entries_;  // entries of further keys that are not in use
  std::map<BlockId, std::vector<BlockId>> further_;  // further entries of a block, in order
  std::vector<BlockId> firsts_;  // first entry of each bucket's chain; the null block: empty
  std::size_t mask_ = 0;         // number of buckets - 1; it is a power of two
};

// The queue of free blocks in eviction order: blocks join at either end, leave at the front, and
// may leave from the middle when a lookup hits them.
//
// A ring of positions instead of vLLM's linked list (FreeKVCacheBlockQueue): the next blocks to
// leave are adjacent in memory, so upcoming() can prefetch what their eviction touches.
//
// Invariants
// (1) ring_[place_[b]] is b for every block in the queue. A position that a block has left from the
//     middle holds the null block until the front or compact() passes it.
// (2) The ring has at least twice the pool's capacity, so compact() drops at least a pool's worth
//     of empty positions each time: joining is amortized O(1).
//
// Not checked here: that a block joins once. The pool's ref_cnt ensures it.

class FreeQueue {
 public:
  // Holds blocks 1 .. num_blocks - 1 in this order.
  explicit FreeQueue(std::int64_t num_blocks);

  std::int64_t size() const { return size_; }
  BlockId pop_front();  // REQUIRES: size() > 0
  void push_back(BlockId block);
  void push_front(BlockId block);
  void remove(BlockId block);  // REQUIRES: the block is in the queue

  // The block `distance` positions from the front, an earlier block that has left, or the null
  // block: a hint for prefetching only.
  BlockId upcoming(std::uint32_t distance) const { return ring_[(front_ + distance) & mask_]; }
  // Front first, in the memory of `blocks`: O(ring).
  std::vector<BlockId> in_order(std::vector<BlockId> blocks) const;

 private:
  // Stores the block at a position and records the position: invariant (1).
  void put(std::uint32_t place, BlockId block) {
    ring_[place & mask_] = block;
    place_[block] = place;
  }
  // Counts gaps too: a full ring may hold few blocks.
  bool is_full() const { return end_ - front_ == ring_.size(); }
  void compact();

  std::vector<BlockId> ring_;
  IdVector<BlockId, std::uint32_t> place_;
  std::uint32_t mask_;
  // Positions [front_, end_) count up and wrap around at 2^32. The ring's length is a power of two,
  // so masking them stays consistent across the wrap.
  std::uint32_t front_ = 0;
  std::uint32_t end_ = 0;
  std::int64_t size_ = 0;  // blocks in the queue, without gaps
};

// Blocks by id, with their references, the free queue and the prefix cache. Managers call it;
// requests hold its blocks only through their tables.
class BlockPool {
 public:
  // All blocks are free, except the null block. REQUIRES: num_blocks >= 1.
  BlockPool(std::int64_t num_blocks, bool enable_caching, FreedBlocks freed_blocks);

  virtual ~BlockPool() = default;

  bool is_caching() const { return enable_caching_; }
  // The null block included.
  std::int64_t num_blocks() const { return std::ssize(ref_cnts_); }
  std::int64_t num_free_blocks() const { return free_.size(); }
  std::int32_t ref_cnt(BlockId block) const {
    check_block(block);
    return ref_cnts_[block];
  }
  // True if the block is in the free queue: a hit on it takes a free block from the pool.
  bool is_evictable(BlockId block) const { return block != kNullBlock && ref_cnt(block) == 0; }

  // Front first, in the memory of `blocks`.
  std::vector<BlockId> free_queue(std::vector<BlockId> blocks = {}) const {
    return free_.in_order(std::move(blocks));
  }

  // Limits the blocks in use, whatever the size of the pool: a pool that has lost some of its
  // blocks. Blocks already in use above the limit stay allocated. 0: no block is allocated.
  void limit_blocks_in_use(std::int64_t num_blocks) { in_use_max_ = num_blocks; }
  // True if `count` more blocks may be allocated now. CacheCounters::refused counts the refusals by
  // the limit, not those of a pool without free blocks.
  bool can_give(std::int64_t count);

  // Appends `count` blocks from the front of the queue to `out`, each with one reference, and
  // evicts their cached content. REQUIRES: count <= num_free_blocks().
  void get_new_blocks(std::int64_t count, std::vector<BlockId>& out);
  // Adds one reference per block, for a prefix hit or a transfer; a free block leaves the queue.
  // Ignores null blocks.
  void touch(std::span<const BlockId> blocks);
  // Removes one reference per block; blocks without references join the queue. Ignores null blocks.
  // `of_window`: the blocks have left a window, or belong to a window group whose request ends,
  // which some releases free differently (FreedBlocks).
  void free_blocks(std::span<const BlockId> blocks, bool of_window = false);
  // The same from the last block to the first: a request's tail is evicted before its prefix, which
  // more requests can share.
  void free_blocks_reversed(std::span<const BlockId> blocks, bool of_window = false);

  // Removes one reference per block and watches it. Blocks without references join the back of the
  // queue, cached or not. The owner may read such a block until on_reuse() reports it. REQUIRES:
  // on_reuse() was called; no null block.
  void unpin_blocks(std::span<const BlockId> blocks);
  // Sets the callback for watched blocks, called when the pool allocates one again or resets the
  // cache. Watches none before the next unpin_blocks().
  void on_reuse(std::function<void(BlockId)> told);

  // Publishes a full block, the end of a prefix of `num_tokens` tokens. Replaces the keys of its
  // parts.
  void cache_block(BlockId block, const BlockKey& key, std::int32_t group,
                   std::int32_t num_tokens = 0);
  // Publishes the first part of a block, the end of a prefix of `num_tokens` tokens. Removes keys
  // of shorter prefixes; with `replaces` all keys, because the block holds other content now.
  // False: the key exists, nothing changed. Source: vLLM 0.33.0, cache_partial_block().
  bool cache_part_of_block(BlockId block, const BlockKey& key, std::int32_t group,
                           std::int32_t num_tokens, bool replaces = false);
  // Moves the keys of `from` to `to`. The worker copies the content before any hit can read it.
  void move_keys(BlockId from, BlockId to);
  // Removes the keys of blocks whose content no longer matches them. References stay as they are.
  void evict_blocks(std::span<const BlockId> blocks);
  // True if the block has a key. REQUIRES: a block of this pool.
  bool is_cached(BlockId block) const {
    check_block(block);
    return enable_caching_ && cache_.contains(block);
  }
  // The prefix cache. REQUIRES: the pool caches.
  const PrefixCache& cache() const {
    LS_CHECK(enable_caching_, "a pool without caching has no cache entries");
    return cache_;
  }
  // Removes all keys and reports every watched block as reused. False, and nothing changes, while
  // any block is in use.
  bool reset_prefix_cache();

  // Returns the counters since the last call.
  CacheCounters take_counters();

  // Starts the event log; events() is null before. Earlier changes are not in it.
  void keep_events() { events_ = std::make_unique<CacheEventLog>(); }
  CacheEventLog* events() { return events_.get(); }

 protected:
  // Ends the old content of a block that gets a new holder. A planted defect skips this.
  virtual void hand_out(BlockId block) { evict(block); }

 private:
  // Ids come from other classes, and from pools of another size.
  void check_block(BlockId block) const {
    LS_CHECK(index_of(block) >= 0 && index_of(block) < num_blocks(), "block {} in a pool of {}",
             index_of(block), num_blocks());
  }
  // Removes one reference per block of the range. Uncached blocks without references join the front
  // if `unhashed_first`.
  template <typename Iterator>
  void release(Iterator begin, Iterator end, bool unhashed_first);
  // Removes all keys of the block, with their events.
  void evict(BlockId block);
  void prefetch_evictions() const;

  // Ends the watch of the block and calls on_reuse()'s callback; nothing if it is not watched.
  void note_reuse(BlockId block);

  IdVector<BlockId, std::int32_t> ref_cnts_;
  FreeQueue free_;
  std::vector<BlockId> unhashed_;  // scratch of release()
  std::int64_t in_use_max_ = std::numeric_limits<std::int64_t>::max();
  bool enable_caching_;
  bool unhashed_first_;
  bool unhashed_of_windows_first_;
  PrefixCache cache_;
  CacheCounters counters_;
  std::unique_ptr<CacheEventLog> events_;
  std::function<void(BlockId)> reused_;  // null: nothing is watched
  std::vector<bool> is_watched_;         // by block
};

}  // namespace lockstep
