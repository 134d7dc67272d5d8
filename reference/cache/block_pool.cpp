#include "reference/cache/block_pool.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace lockstep {
namespace {

// Checks that the id names a block of the cache, not an entry of a further key.
void check_block(BlockId block, std::int64_t num_blocks) {
  LS_CHECK(index_of(block) >= 0 && index_of(block) < num_blocks, "block {} in a cache of {}",
           index_of(block), num_blocks);
}

}  // namespace

// Two buckets per block or more: invariant (3).
PrefixCache::PrefixCache(std::int64_t num_blocks)
    : num_blocks_(num_blocks),
      entries_(num_blocks),
      firsts_(std::bit_ceil(2 * static_cast<std::size_t>(num_blocks)), kNullBlock),
      mask_(firsts_.size() - 1) {}

// Walks the chain: expected length 1, invariant (3). Other keys in the bucket are passed over.
BlockId PrefixCache::first_of(const BlockKey& mixed_key, BlockId from) const {
  while (from != kNullBlock && !(entries_[from].key == mixed_key)) from = entries_[from].next;
  return from;
}

BlockId PrefixCache::find(const BlockKey& key, std::int32_t group) const {
  // The group is part of the key, so group_of() need not be compared. Blocks added later come later
  // in the chain: the first match is the oldest.
  const BlockKey mixed_key = mixed(key, group);
  return block_of(first_of(mixed_key, firsts_[bucket_of(mixed_key)]));
}

bool PrefixCache::has_key(BlockId block, const BlockKey& key, std::int32_t group) const {
  check_block(block, num_blocks_);
  if (!contains(block)) return false;
  const BlockKey mixed_key = mixed(key, group);
  if (entries_[block].key == mixed_key) return true;
  const auto further = further_.find(block);
  return further != further_.end() && std::ranges::any_of(further->second, [&](BlockId entry) {
           return entries_[entry].key == mixed_key;
         });
}

// Appends to the chain's end through the first entry's `previous`, which is the last entry.
void PrefixCache::link(BlockId entry) {
  BlockId& first = firsts_[bucket_of(entries_[entry].key)];
  entries_[entry].previous = entry;
  entries_[entry].next = kNullBlock;
  if (first == kNullBlock) {
    first = entry;
    return;
  }
  BlockId& last = entries_[first].previous;
  entries_[last].next = entry;
  entries_[entry].previous = last;
  last = entry;
}

void PrefixCache::unlink(BlockId which) {
  Entry& entry = entries_[which];
  BlockId& first = firsts_[bucket_of(entry.key)];
  LS_CHECK(first != kNullBlock, "entry {} is in no chain", index_of(which));
  // Chains are circular backwards only, invariant (2). `keeper` stores the backward link to this
  // entry: its successor, or the first of the chain if this is the last. In a chain of one,
  // `keeper` is the entry itself.
  const BlockId keeper = entry.next != kNullBlock ? entry.next : first;
  entries_[keeper].previous = entry.previous;
  if (first == which)
    first = entry.next;
  else
    entries_[entry.previous].next = entry.next;
  entry.group = kNotCached;
}

// num_tokens is of the first key only: further keys end shorter prefixes of the same block.
void PrefixCache::add(BlockId block, const BlockKey& key, std::int32_t group,
                      std::int32_t num_tokens) {
  check_block(block, num_blocks_);
  Entry& entry = entries_[block];
  LS_CHECK(block != kNullBlock, "the null block holds nothing");
  LS_CHECK(entry.group == kNotCached, "block {} is cached already", index_of(block));
  entry.key = mixed(key, group);
  entry.group = group;
  entry.num_tokens = num_tokens;
  link(block);
}

void PrefixCache::add_further(BlockId block, const BlockKey& key, std::int32_t group) {
  check_block(block, num_blocks_);
  LS_CHECK(contains(block), "block {} has no first key", index_of(block));
  if (spare_entries_.empty()) {
    spare_entries_.push_back(BlockId{static_cast<std::int32_t>(entries_.size())});
    entries_.emplace_back();
    owners_.push_back(kNullBlock);
  }
  // Entries of further keys are rare, so they are stored after the pool's own and reused. A pool
  // that never hits parts of blocks never grows.
  const BlockId entry = spare_entries_.back();
  spare_entries_.pop_back();
  owners_[static_cast<std::size_t>(index_of(entry) - num_blocks_)] = block;
  entries_[entry].key = mixed(key, group);
  entries_[entry].group = group;
  link(entry);
  further_[block].push_back(entry);
}

// The first key, then the further ones; their entries return to the spare list.
std::int64_t PrefixCache::remove(BlockId block) {
  check_block(block, num_blocks_);
  if (!contains(block)) return 0;
  unlink(block);
  // Almost always empty: this saves a lookup for each eviction.
  if (further_.empty()) return 1;
  const auto further = further_.find(block);
  if (further == further_.end()) return 1;
  const std::int64_t count = 1 + std::ssize(further->second);
  for (const BlockId entry : further->second) {
    unlink(entry);
    spare_entries_.push_back(entry);
  }
  further_.erase(further);
  return count;
}

// Keys are unmixed and mixed again, since the entry of `to` has its own place in the chains: moved
// keys join at the end, after other blocks with the same key.
void PrefixCache::move_keys(BlockId from, BlockId to) {
  if (!contains(from)) return;
  const std::int32_t group = group_of(from);
  const std::int32_t num_tokens = num_tokens_of(from);
  std::vector<BlockKey> keys = {key_of(from)};
  if (const auto further = further_.find(from); further != further_.end())
    for (const BlockId entry : further->second) keys.push_back(key_of(entry));
  remove(from);
  add(to, keys[0], group, num_tokens);
  for (std::size_t i = 1; i < keys.size(); ++i) add_further(to, keys[i], group);
}

// Chains need no unlinking: every bucket and every entry is reset. Spare entries keep their memory.
void PrefixCache::clear() {
  for (auto& entry : entries_) entry.group = kNotCached;
  for (BlockId& first : firsts_) first = kNullBlock;
  for (const auto& [block, entries] : further_)
    spare_entries_.insert(spare_entries_.end(), entries.begin(), entries.end());
  further_.clear();
}

// Twice the pool's size, rounded up to a power of two, so that a position is a mask.
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
    // Skips gaps: each gap is passed once, so this is O(1) amortized.
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

// Leaves a gap. Its position is known, so no search is needed; vLLM's linked list unlinks instead.
void FreeQueue::remove(BlockId block) {
  BlockId& place = ring_[place_[block] & mask_];
  LS_CHECK(place == block, "block {} is not in the free queue", index_of(block));
  place = kNullBlock;
  --size_;
}

// Closes the gaps when the ring is full: removing costs O(1), and a push O(1) on average. Blocks
// keep their order. `end` never passes `place`, so no block is overwritten before it is read.
void FreeQueue::compact() {
  std::uint32_t end = front_;
  for (std::uint32_t place = front_; place != end_; ++place)
    if (const BlockId block = ring_[place & mask_]; block != kNullBlock) put(end++, block);
  end_ = end;
}

std::vector<BlockId> FreeQueue::in_order(std::vector<BlockId> blocks) const {
  blocks.clear();
  blocks.reserve(size_);
  for (std::uint32_t place = front_; place != end_; ++place)
    if (const BlockId block = ring_[place & mask_]; block != kNullBlock) blocks.push_back(block);
  LS_CHECK(std::ssize(blocks) == size_, "{} blocks in a free queue of {}", blocks.size(), size_);
  return blocks;
}

// cache_ has one entry without caching: nothing looks it up, and it costs no memory.
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

// Removes every key of the block and emits its removal events first, in the order of the keys.
void BlockPool::evict(BlockId block) {
  check_block(block);
  if (events_ != nullptr) events_->removed(block);
  counters_.evicted += cache_.remove(block);
}

bool BlockPool::can_give(std::int64_t count) {
  if (count > num_free_blocks()) return false;
  const std::int64_t in_use = num_blocks() - 1 - num_free_blocks();
  // Only refusals by the limit count: the scheduler handles a pool without free blocks.
  if (count == 0 || in_use + count <= in_use_max_) return true;
  ++counters_.refused;
  return false;
}

// One block at a time, as each eviction may call back into the owner of a watched block. The watch
// is reported before the eviction, as in vLLM 0.33.0, get_new_blocks().
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

// Hides the memory latency of evictions: the tables of a large pool are larger than the processor's
// caches. An eviction reads a block's entry, which gives the address of its bucket, so the entry is
// prefetched twelve pops ahead and the bucket six pops ahead.
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
    // A hit on a free block takes it out of the queue, wherever it is.
    if (is_evictable(block)) free_.remove(block);
    ++ref_cnts_[block];
  }
}

// Blocks shared with other requests only lose a reference: their place in the queue is decided when
// the last holder frees them.
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
  // Pushed to the front in reverse: the first block of the call is allocated first, invariant (3).
  // vLLM prepends the whole list, with the same result.
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

// Content stays where it is while ref_cnt is 0, so a reader can continue until the block is reused.
// Unlike freed blocks, an uncached one joins the back as well: it is evicted last.
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

// Clears the mark first: the callback may unpin or touch other blocks.
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

// A key of a longer prefix stays first, and the new one becomes a further key: both end in this
// block, and its content covers both. Keys of shorter prefixes go once a longer one is published,
// as in vLLM's cache_partial_block().
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

// The null block is never free, so an idle pool has num_blocks - 1 free blocks.
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
