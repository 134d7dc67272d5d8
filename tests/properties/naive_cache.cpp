#include "tests/properties/naive_cache.h"

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

bool NaiveGroup::all_cached(std::span<const BlockKey> keys, std::int64_t first,
                            std::int64_t last) const {
  for (std::int64_t i = first; i < last; ++i)
    if (cached(keys, i) == kNullBlock) return false;
  return true;
}

std::vector<BlockId> NaiveGroup::hit(std::span<const BlockKey> keys,
                                     std::int64_t max_length) const {
  const std::int64_t most = max_length / spec_.block_size;
  std::int64_t first = 0;  // blocks [first, end) are hit, those before count as read
  std::int64_t end = 0;
  switch (spec_.kind) {
    case CacheKind::sliding_window: {
      const std::int64_t needed = std::max<std::int64_t>(
          1, (spec_.sliding_window - 1 + spec_.block_size - 1) / spec_.block_size);
      end = most;
      while (!all_cached(keys, std::max<std::int64_t>(0, end - needed), end)) --end;
      first = std::max<std::int64_t>(0, end - needed);
      break;
    }
    case CacheKind::chunked_local:
      first =
          max_length / spec_.attention_chunk_size * spec_.attention_chunk_size / spec_.block_size;
      for (end = first; end < most && cached(keys, end) != kNullBlock;) ++end;
      break;
    case CacheKind::mamba:
      for (end = most; end > 0 && cached(keys, end - 1) == kNullBlock;) --end;
      first = std::max<std::int64_t>(0, end - 1);
      break;
    default:
      while (end < most && cached(keys, end) != kNullBlock) ++end;
  }
  std::vector<BlockId> blocks(static_cast<std::size_t>(first), kNullBlock);
  for (std::int64_t i = first; i < end; ++i) blocks.push_back(cached(keys, i));
  return blocks;
}

std::int64_t NaiveGroup::num_unread(std::int64_t num_computed) const {
  std::int64_t tokens = 0;
  if (spec_.kind == CacheKind::sliding_window) tokens = num_computed - spec_.sliding_window + 1;
  if (spec_.kind == CacheKind::chunked_local)
    tokens = num_computed / spec_.attention_chunk_size * spec_.attention_chunk_size;
  if (spec_.kind == CacheKind::mamba) tokens = num_computed - 1;
  return std::max<std::int64_t>(0, tokens) / spec_.block_size;
}

void NaiveGroup::take_hit(Table& table, const std::vector<BlockId>& hit, std::int64_t num_tokens) {
  table.blocks = hit;
  const auto unread = std::min(num_unread(num_tokens), std::ssize(hit));
  std::fill_n(table.blocks.begin(), unread, kNullBlock);
  for (const BlockId block : table.blocks)
    if (block != kNullBlock) pool_.touch(block);
  table.num_published = std::ssize(table.blocks);
}

void NaiveGroup::retire(Table& table, std::int64_t num_computed) {
  std::vector<BlockId> gone;  // the right-most first
  for (std::int64_t i = std::min(num_unread(num_computed), std::ssize(table.blocks)) - 1; i >= 0;
       --i) {
    BlockId& block = table.blocks[static_cast<std::size_t>(i)];
    if (block != kNullBlock) gone.push_back(block);
    block = kNullBlock;
  }
  pool_.free_blocks(gone);
}

void NaiveGroup::grow(Table& table, std::int64_t num_tokens) {
  const std::int64_t size = (num_tokens + spec_.block_size - 1) / spec_.block_size;
  const bool one_state =
      spec_.kind == CacheKind::mamba && spec_.mamba_cache_mode == MambaCacheMode::align;
  while (std::ssize(table.blocks) < size) {
    const bool passed_over = one_state && std::ssize(table.blocks) + 1 < size;
    table.blocks.push_back(passed_over ? kNullBlock : pool_.get_new_blocks(1).front());
  }
}

void NaiveGroup::publish(Table& table, std::span<const BlockKey> keys, std::int64_t num_tokens) {
  const std::int64_t full = std::min(num_tokens / spec_.block_size, std::ssize(keys));
  for (; table.num_published < full; ++table.num_published) {
    const auto i = static_cast<std::size_t>(table.num_published);
    if (table.blocks[i] != kNullBlock) pool_.cache_block(table.blocks[i], keys[i], group_);
  }
}

void NaiveGroup::free(Table& table) {
  pool_.free_blocks({table.blocks.rbegin(), table.blocks.rend()});
  table = {};
}

}  // namespace lockstep
