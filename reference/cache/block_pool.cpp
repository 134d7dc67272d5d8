#include "reference/cache/block_pool.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "base/check.h"

namespace lockstep {

FreeQueue::FreeQueue(std::int64_t num_blocks)
    : ring_(std::bit_ceil(static_cast<std::size_t>(2 * num_blocks)), kNullBlock),
      place_(num_blocks),
      mask_(static_cast<std::uint32_t>(ring_.size() - 1)) {
  for (std::int64_t i = 1; i < num_blocks; ++i) push_back(BlockId{static_cast<std::int32_t>(i)});
}

BlockId FreeQueue::pop_front() {
  LS_CHECK(size_ > 0, "no block is free");
  BlockId block;
  do {
    block = ring_[front_++ & mask_];
  } while (block == kNullBlock);
  --size_;
  return block;
}

void FreeQueue::push_back(BlockId block) {
  if (is_full()) compact();
  put(end_++, block);
  ++size_;
}

void FreeQueue::push_front(BlockId block) {
  if (is_full()) compact();
  put(--front_, block);
  ++size_;
}

void FreeQueue::remove(BlockId block) {
  BlockId& place = ring_[place_[block] & mask_];
  LS_CHECK(place == block, "block {} is not in the free queue", index_of(block));
  place = kNullBlock;
  --size_;
}

void FreeQueue::compact() {
  std::uint32_t end = front_;
  for (std::uint32_t place = front_; place != end_; ++place)
    if (const BlockId block = ring_[place & mask_]; block != kNullBlock) put(end++, block);
  end_ = end;
}

std::vector<BlockId> FreeQueue::in_order() const {
  std::vector<BlockId> blocks;
  blocks.reserve(size_);
  for (std::uint32_t place = front_; place != end_; ++place)
    if (const BlockId block = ring_[place & mask_]; block != kNullBlock) blocks.push_back(block);
  LS_CHECK(std::ssize(blocks) == size_, "{} blocks in a free queue of {}", blocks.size(), size_);
  return blocks;
}

BlockPool::BlockPool(std::int64_t num_blocks, bool enable_caching, FreedBlocks freed_blocks)
    : ref_cnts_(num_blocks),
      free_(num_blocks),
      enable_caching_(enable_caching),
      unhashed_first_(freed_blocks == FreedBlocks::unhashed_first ||
                      (freed_blocks == FreedBlocks::unhashed_first_if_caching && enable_caching)),
      unhashed_of_windows_first_(unhashed_first_ ||
                                 freed_blocks == FreedBlocks::unhashed_behind_windows_first),
      cache_(enable_caching ? num_blocks : 1) {
  LS_CHECK(num_blocks >= 1, "a pool of {} blocks", num_blocks);
}

// Takes away every key of the block.
void BlockPool::evict(BlockId block) {
  check_block(block);
  if (events_ != nullptr) events_->removed(block);
  counters_.evicted += cache_.remove(block);
}

bool BlockPool::can_give(std::int64_t count) {
  if (count > num_free_blocks()) return false;
  const std::int64_t in_use = num_blocks() - 1 - num_free_blocks();
  if (count == 0 || in_use + count <= in_use_max_) return true;
  ++counters_.refused;
  return false;
}

void BlockPool::get_new_blocks(std::int64_t count, std::vector<BlockId>& out) {
  LS_CHECK(count <= num_free_blocks(), "{} blocks wanted, {} free", count, num_free_blocks());
  for (; count > 0; --count) {
    const BlockId block = free_.pop_front();
    LS_CHECK(ref_cnt(block) == 0, "block {} is free with {} holders", index_of(block),
             ref_cnt(block));
    ref_cnts_[block] = 1;
    if (reused_) note_reuse(block);
    if (enable_caching_) {
      prefetch_evictions();
      hand_out(block);
    }
    out.push_back(block);
  }
}

// The tables of a large pool are larger than the processor's caches. An eviction reads a block's
// entry, and from it where its bucket is, so they are fetched one after the other.
void BlockPool::prefetch_evictions() const {
  constexpr std::uint32_t kEntry = 12, kBucket = 6;  // pops ahead
  const BlockId soon = free_.upcoming(kEntry);
  cache_.prefetch_entry(soon);
  __builtin_prefetch(&ref_cnts_[soon]);
  cache_.prefetch_bucket(free_.upcoming(kBucket));
}

void BlockPool::evict_blocks(std::span<const BlockId> blocks) {
  if (!enable_caching_) return;
  for (const BlockId block : blocks) evict(block);
}

void BlockPool::touch(std::span<const BlockId> blocks) {
  for (const BlockId block : blocks) {
    check_block(block);
    if (is_evictable(block)) free_.remove(block);
    ++ref_cnts_[block];
  }
}

template <typename Iterator>
void BlockPool::release(Iterator begin, Iterator end, bool unhashed_first) {
  unhashed_.clear();
  for (; begin != end; ++begin) {
    const BlockId block = *begin;
    if (block == kNullBlock) continue;
    check_block(block);
    std::int32_t& ref_cnt = ref_cnts_[block];
    LS_CHECK(ref_cnt > 0, "block {} freed once too often", index_of(block));
    if (--ref_cnt > 0) continue;
    if (unhashed_first && !is_cached(block))
      unhashed_.push_back(block);
    else
      free_.push_back(block);
  }
  for (auto block = unhashed_.rbegin(); block != unhashed_.rend(); ++block)
    free_.push_front(*block);
}

void BlockPool::free_blocks(std::span<const BlockId> blocks, bool of_window) {
  release(blocks.begin(), blocks.end(), of_window ? unhashed_of_windows_first_ : unhashed_first_);
}

void BlockPool::free_blocks_reversed(std::span<const BlockId> blocks, bool of_window) {
  release(blocks.rbegin(), blocks.rend(), of_window ? unhashed_of_windows_first_ : unhashed_first_);
}

void BlockPool::on_reuse(std::function<void(BlockId)> told) {
  reused_ = std::move(told);
  is_watched_.assign(static_cast<std::size_t>(num_blocks()), false);
}

void BlockPool::unpin_blocks(std::span<const BlockId> blocks) {
  for (const BlockId block : blocks) {
    check_block(block);
    std::int32_t& ref_cnt = ref_cnts_[block];
    LS_CHECK(ref_cnt > 0 && block != kNullBlock, "block {} unpinned with {} holders",
             index_of(block), ref_cnt);
    is_watched_[static_cast<std::size_t>(index_of(block))] = true;
    if (--ref_cnt == 0) free_.push_back(block);
  }
}

void BlockPool::note_reuse(BlockId block) {
  const auto i = static_cast<std::size_t>(index_of(block));
  if (!is_watched_[i]) return;
  is_watched_[i] = false;
  reused_(block);
}

void BlockPool::cache_block(BlockId block, const BlockKey& key, std::int32_t group,
                            std::int32_t num_tokens) {
  LS_CHECK(enable_caching_, "block {} published in a pool without caching", index_of(block));
  if (cache_.contains(block)) evict(block);  // the whole block stands for its parts now
  cache_.add(block, key, group, num_tokens);
  ++counters_.stored;
}

bool BlockPool::cache_part_of_block(BlockId block, const BlockKey& key, std::int32_t group,
                                    std::int32_t num_tokens, bool replaces) {
  LS_CHECK(enable_caching_, "block {} published in a pool without caching", index_of(block));
  if (!replaces && cache_.has_key(block, key, group)) return false;
  const bool is_longer = cache_.contains(block) && cache_.num_tokens_of(block) < num_tokens;
  if (replaces || is_longer) evict(block);
  if (cache_.contains(block))
    cache_.add_further(block, key, group);
  else
    cache_.add(block, key, group, num_tokens);
  ++counters_.stored;
  return true;
}

void BlockPool::move_keys(BlockId from, BlockId to) {
  if (!enable_caching_) return;
  cache_.move_keys(from, to);
  if (events_ != nullptr) events_->moved(from, to);
}

bool BlockPool::reset_prefix_cache() {
  if (num_free_blocks() != num_blocks() - 1) return false;
  cache_.clear();
  for (std::size_t i = 0; i < is_watched_.size(); ++i)
    note_reuse(BlockId{static_cast<std::int32_t>(i)});
  counters_.cleared = true;
  if (events_ != nullptr) events_->cleared();
  return true;
}

CacheCounters BlockPool::take_counters() { return std::exchange(counters_, {}); }

}  // namespace lockstep
