#include "reference/block_pool.h"

#include <algorithm>
#include <utility>

#include "reference/check.h"

namespace lockstep {

BlockPool::BlockPool(std::int64_t num_blocks, bool enable_caching, FreedBlocks freed_blocks)
    : blocks_(static_cast<std::size_t>(num_blocks)),
      num_free_(num_blocks - 1),
      enable_caching_(enable_caching),
      unhashed_first_(freed_blocks == FreedBlocks::unhashed_first),
      cache_(enable_caching ? num_blocks : 1) {
  LS_CHECK(num_blocks >= 1, "a pool of {} blocks", num_blocks);
  for (std::int64_t i = 0; i < num_blocks; ++i) {
    blocks_[static_cast<std::size_t>(i)].next =
        BlockId{static_cast<std::int32_t>((i + 1) % num_blocks)};
    blocks_[static_cast<std::size_t>((i + 1) % num_blocks)].previous =
        BlockId{static_cast<std::int32_t>(i)};
  }
}

void BlockPool::unlink(BlockId block) {
  Block& b = blocks_[at(block)];
  blocks_[at(b.previous)].next = b.next;
  blocks_[at(b.next)].previous = b.previous;
  --num_free_;
}

std::vector<BlockId> BlockPool::free_queue() const {
  std::vector<BlockId> queue;
  for (BlockId block = blocks_[0].next; block != kNullBlock; block = blocks_[at(block)].next) {
    queue.push_back(block);
    LS_CHECK(std::ssize(queue) <= num_free_, "the free queue has a loop at block {}",
             index_of(block));
  }
  return queue;
}

// Takes away every key of the block.
void BlockPool::evict(BlockId block) {
  if (events_ != nullptr) events_->removed(block);
  if (cache_.remove(block)) ++counters_.evicted;
  evict_parts(block);
}

void BlockPool::evict_parts(BlockId block) {
  if (keys_of_parts_.empty()) return;
  const auto parts = keys_of_parts_.find(block);
  if (parts == keys_of_parts_.end()) return;
  if (events_ != nullptr) events_->removed(block);
  counters_.evicted += std::ssize(parts->second);
  keys_of_parts_.erase(parts);
}

void BlockPool::get_new_blocks(std::int64_t count, std::vector<BlockId>& out) {
  LS_CHECK(count <= num_free_, "{} blocks wanted, {} free", count, num_free_);
  for (; count > 0; --count) {
    const BlockId block = blocks_[at(kNullBlock)].next;
    LS_CHECK(ref_cnt(block) == 0, "block {} is free with {} holders", index_of(block),
             ref_cnt(block));
    unlink(block);
    blocks_[at(block)].ref_cnt = 1;
    if (enable_caching_) {
      if (!evicts_late_) evict(block);
      const BlockId following = blocks_[at(kNullBlock)].next;
      cache_.prefetch(following);
      cache_.prefetch_entry(blocks_[at(following)].next);
    }
    out.push_back(block);
  }
}

void BlockPool::evict_blocks(std::span<const BlockId> blocks) {
  if (!enable_caching_) return;
  for (const BlockId block : blocks) evict(block);
}

void BlockPool::touch(std::span<const BlockId> blocks) {
  for (const BlockId block : blocks) {
    if (is_evictable(block)) unlink(block);
    ++blocks_[at(block)].ref_cnt;
  }
}

void BlockPool::insert_after(BlockId place, BlockId block) {
  const BlockId next = blocks_[at(place)].next;
  blocks_[at(block)].previous = place;
  blocks_[at(block)].next = next;
  blocks_[at(place)].next = block;
  blocks_[at(next)].previous = block;
  ++num_free_;
}

template <typename Iterator>
void BlockPool::release(Iterator begin, Iterator end) {
  BlockId front = kNullBlock;  // the last block that this call put to the front
  for (; begin != end; ++begin) {
    const BlockId block = *begin;
    if (block == kNullBlock) continue;
    std::int32_t& ref_cnt = blocks_[at(block)].ref_cnt;
    LS_CHECK(ref_cnt > 0, "block {} freed once too often", index_of(block));
    if (--ref_cnt > 0) continue;
    if (unhashed_first_ && !is_hashed(block)) {
      insert_after(front, block);
      front = block;
    } else {
      insert_after(blocks_[at(kNullBlock)].previous, block);
    }
  }
}

void BlockPool::free_blocks(std::span<const BlockId> blocks) {
  release(blocks.begin(), blocks.end());
}

void BlockPool::free_blocks_reversed(std::span<const BlockId> blocks) {
  release(blocks.rbegin(), blocks.rend());
}

void BlockPool::cache_block(BlockId block, const BlockKey& key, std::int32_t group) {
  if (evicts_late_) evict(block);
  evict_parts(block);  // the whole block stands for them now
  cache_.add(block, key, group);
  ++counters_.stored;
}

bool BlockPool::cache_part_of_block(BlockId block, const BlockKey& key) {
  std::vector<BlockKey>& parts = keys_of_parts_[block];
  if (std::ranges::find(parts, key) != parts.end()) return false;
  parts.push_back(key);
  ++counters_.stored;
  return true;
}

bool BlockPool::reset_prefix_cache() {
  if (num_free_ != num_blocks() - 1) return false;
  cache_.clear();
  keys_of_parts_.clear();
  counters_.cleared = true;
  if (events_ != nullptr) events_->cleared();
  return true;
}

CacheCounters BlockPool::take_counters() { return std::exchange(counters_, {}); }

}  // namespace lockstep
