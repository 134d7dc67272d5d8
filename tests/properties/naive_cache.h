// The cache as its rules state: the block pool and the managers of one group, a page of code each.
// Those of reference/ are compared with them, operation by operation.
#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <utility>
#include <vector>

#include "base/ids.h"
#include "reference/cache/block_hash.h"
#include "reference/profiles/engine_profile.h"
#include "reference/types/kv_cache_spec.h"

namespace lockstep {

// A list, a map and counts. Not modelled: content of a part of a block, events, speed.
class NaiveBlockPool {
 public:
  NaiveBlockPool(std::int32_t num_blocks, FreedBlocks freed_blocks);

  const std::deque<BlockId>& free_queue() const { return free_; }
  std::int32_t ref_cnt(BlockId block) const { return ref_cnt_[at(block)]; }
  bool is_cached(BlockId block) const;

  std::vector<BlockId> get_new_blocks(std::int64_t count);
  void touch(BlockId block);
  void free_blocks(const std::vector<BlockId>& blocks);
  void cache_block(BlockId block, const BlockKey& key, std::int32_t group);
  BlockId find(const BlockKey& key, std::int32_t group) const;  // the null block: nowhere
  bool reset_prefix_cache();

 private:
  struct Cached {
    BlockId block;
    BlockKey key;
    std::int32_t group;
  };
  static std::size_t at(BlockId block) { return static_cast<std::size_t>(index_of(block)); }

  FreedBlocks freed_blocks_;
  std::vector<std::int32_t> ref_cnt_;
  std::deque<BlockId> free_;
  std::vector<Cached> cached_;  // in the order in which they were added
};

// The cache of one group, kind by kind: which blocks a request holds, what a prefix hit is, what is
// freed.
//
//   full attention  every block; a hit is the longest chain from the left
//   sliding window  the blocks of the last window - 1 tokens and the new ones; a hit is the
//                   right-most position before which as many blocks as the window needs are cached,
//                   or all there are
//   chunked local   the blocks of the current chunk; blocks before it count as hit
//   states, none    one block for the whole request; no hits
//   states, align   the running state and saved ones at block boundaries; one block per step
//                   however many boundaries it crosses; a hit is the right-most saved state
//   states, all     a state per block, of which the running one is kept; hits as in align
//
// Not modelled: blocks longer than a hash, EAGLE's dropped block, drafts, sparse retention,
// RetireBasis::scheduled for states.
class NaiveGroup {
 public:
  // Both must outlive this.
  NaiveGroup(const KVCacheSpec& spec, NaiveBlockPool& pool, std::int32_t group = 0)
      : spec_(spec), pool_(pool), group_(group) {}

  struct Table {
    std::vector<BlockId> blocks;
    std::int64_t num_published = 0;
  };

  // keys[i]: the content of block i and all before it. At most max_length tokens.
  std::vector<BlockId> hit(std::span<const BlockKey> keys, std::int64_t max_length) const;
  void take_hit(Table& table, const std::vector<BlockId>& hit, std::int64_t num_tokens);
  void retire(Table& table, std::int64_t num_computed);
  void grow(Table& table, std::int64_t num_tokens);
  void publish(Table& table, std::span<const BlockKey> keys, std::int64_t num_tokens);
  void free(Table& table);

 private:
  // Blocks at the head that are no longer read when num_computed tokens are computed.
  std::int64_t num_unread(std::int64_t num_computed) const;
  BlockId cached(std::span<const BlockKey> keys, std::int64_t index) const {
    return pool_.find(keys[static_cast<std::size_t>(index)], group_);
  }
  bool all_cached(std::span<const BlockKey> keys, std::int64_t first, std::int64_t last) const;

  const KVCacheSpec& spec_;
  NaiveBlockPool& pool_;
  std::int32_t group_;
};

}  // namespace lockstep
