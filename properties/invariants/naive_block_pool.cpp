#include "properties/invariants/naive_block_pool.h"

#include <algorithm>

#include "base/check.h"

namespace lockstep {

NaiveBlockPool::NaiveBlockPool(std::int32_t num_blocks, FreedBlocks freed_blocks)
    : freed_blocks_(freed_blocks), ref_cnt_(static_cast<std::size_t>(num_blocks), 0) {
  for (std::int32_t i = 1; i < num_blocks; ++i) free_.push_back(BlockId{i});
}

bool NaiveBlockPool::is_cached(BlockId block) const {
  return std::ranges::find(cached_, block, &Cached::block) != cached_.end();
}

std::vector<BlockId> NaiveBlockPool::get_new_blocks(std::int64_t count) {
  LS_CHECK(count <= std::ssize(free_), "{} of {} blocks", count, free_.size());
  std::vector<BlockId> blocks;
  for (; count > 0; --count) {
    const BlockId block = free_.front();
    free_.pop_front();
    std::erase_if(cached_, [&](const Cached& c) { return c.block == block; });
    ref_cnt_[at(block)] = 1;
    blocks.push_back(block);
  }
  return blocks;
}

void NaiveBlockPool::touch(BlockId block) {
  if (ref_cnt_[at(block)]++ == 0) std::erase(free_, block);
}

void NaiveBlockPool::free_blocks(const std::vector<BlockId>& blocks) {
  std::deque<BlockId> front;
  for (const BlockId block : blocks) {
    if (block == kNullBlock || --ref_cnt_[at(block)] > 0) continue;
    const bool first = freed_blocks_ == FreedBlocks::unhashed_first && !is_cached(block);
    (first ? front : free_).push_back(block);
  }
  free_.insert(free_.begin(), front.begin(), front.end());
}

void NaiveBlockPool::cache_block(BlockId block, const BlockKey& key, std::int32_t group) {
  cached_.push_back({block, key, group});
}

BlockId NaiveBlockPool::find(const BlockKey& key, std::int32_t group) const {
  for (const Cached& c : cached_)
    if (c.key == key && c.group == group) return c.block;
  return kNullBlock;
}

bool NaiveBlockPool::reset_prefix_cache() {
  if (free_.size() + 1 != ref_cnt_.size()) return false;
  cached_.clear();
  return true;
}

}  // namespace lockstep
