#include "reference/cache/prefix_cache.h"

#include <bit>

#include "base/check.h"

namespace lockstep {

PrefixCache::PrefixCache(std::int64_t num_blocks)
    : entries_(num_blocks),
      firsts_(std::bit_ceil(2 * static_cast<std::size_t>(num_blocks)), kNullBlock),
      mask_(firsts_.size() - 1) {}

// The first block from `from` on in its chain that holds the key.
BlockId PrefixCache::first_of(const BlockKey& mixed_key, BlockId from) const {
  while (from != kNullBlock && !(entries_[from].key == mixed_key))
    from = entries_[from].next;
  return from;
}

BlockId PrefixCache::find(const BlockKey& key, std::int32_t group) const {
  const BlockKey mixed_key = mixed(key, group);
  return first_of(mixed_key, firsts_[bucket_of(mixed_key)]);
}

bool PrefixCache::added_this_step(const BlockKey& key, std::int32_t group) const {
  const BlockKey mixed_key = mixed(key, group);
  BlockId block = find(key, group);
  while (block != kNullBlock && entries_[block].added_in_step != step_)
    block = first_of(mixed_key, entries_[block].next);
  return block != kNullBlock;
}

void PrefixCache::add(BlockId block, const BlockKey& key, std::int32_t group) {
  Entry& entry = entries_[block];
  LS_CHECK(block != kNullBlock, "the null block holds nothing");
  LS_CHECK(entry.group == kNotCached, "block {} is cached already", index_of(block));
  entry = {mixed(key, group), block, kNullBlock, group, step_};
  BlockId& first = firsts_[bucket_of(entry.key)];
  if (first == kNullBlock) {
    first = block;
    return;
  }
  BlockId& last = entries_[first].previous;
  entries_[last].next = block;
  entry.previous = last;
  last = block;
}

bool PrefixCache::remove(BlockId block) {
  Entry& entry = entries_[block];
  if (entry.group == kNotCached) return false;
  BlockId& first = firsts_[bucket_of(entry.key)];
  LS_CHECK(first != kNullBlock, "block {} is in no chain", index_of(block));
  // Who keeps a link to what came before this block: its successor, or the chain's first.
  const BlockId keeper = entry.next != kNullBlock ? entry.next : first;
  entries_[keeper].previous = entry.previous;
  if (first == block)
    first = entry.next;
  else
    entries_[entry.previous].next = entry.next;
  entry.group = kNotCached;
  return true;
}

void PrefixCache::clear() {
  for (Entry& entry : entries_) entry.group = kNotCached;
  for (BlockId& first : firsts_) first = kNullBlock;
}

BlockKey PrefixCache::key_of(BlockId block) const {
  const Entry& entry = entries_[block];
  LS_CHECK(entry.group != kNotCached, "block {} is not cached", index_of(block));
  const auto g = static_cast<std::uint64_t>(entry.group);
  return {entry.key.low - g * 0x9E3779B97F4A7C15ull, entry.key.high ^ (g * 0xD1342543DE82EF95ull)};
}

}  // namespace lockstep
