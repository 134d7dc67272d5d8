// The block pool in a page of code: a list, a map and counts, each operation as its rule reads. The
// pool under test is held against it, operation by operation.
//
// Not modelled: content of a part of a block, events, speed.
#pragma once

#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "base/ids.h"
#include "reference/cache/block_hash.h"
#include "reference/profiles/engine_profile.h"

namespace lockstep {

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

}  // namespace lockstep
