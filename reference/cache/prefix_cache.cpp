#include "reference/cache/prefix_cache.h"

#include <algorithm>
#include <bit>

#include "base/check.h"

namespace lockstep {
namespace {

void check_block(BlockId block, std::int64_t num_blocks) {
  LS_CHECK(index_of(block) >= 0 && index_of(block) < num_blocks, "block {} in a cache of {}",
           index_of(block), num_blocks);
}

}  // namespace

PrefixCache::PrefixCache(std::int64_t num_blocks)
    : num_blocks_(num_blocks),
      entries_(num_blocks),
      firsts_(std::bit_ceil(2 * static_cast<std::size_t>(num_blocks)), kNullBlock),
      mask_(firsts_.size() - 1) {}

// The first block from `from` on in its chain that holds the key.
BlockId PrefixCache::first_of(const BlockKey& mixed_key, BlockId from) const {
  while (from != kNullBlock && !(entries_[from].key == mixed_key)) from = entries_[from].next;
  return from;
}

BlockId PrefixCache::find(const BlockKey& key, std::int32_t group) const {
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
  // The entry that stores the link to the previous one: the successor, or the first of the chain.
  const BlockId keeper = entry.next != kNullBlock ? entry.next : first;
  entries_[keeper].previous = entry.previous;
  if (first == which)
    first = entry.next;
  else
    entries_[entry.previous].next = entry.next;
  entry.group = kNotCached;
}

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
  const BlockId entry = spare_entries_.back();
  spare_entries_.pop_back();
  owners_[static_cast<std::size_t>(index_of(entry) - num_blocks_)] = block;
  entries_[entry].key = mixed(key, group);
  entries_[entry].group = group;
  link(entry);
  further_[block].push_back(entry);
}

std::int64_t PrefixCache::remove(BlockId block) {
  check_block(block, num_blocks_);
  if (!contains(block)) return 0;
  unlink(block);
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

void PrefixCache::clear() {
  for (auto& entry : entries_) entry.group = kNotCached;
  for (BlockId& first : firsts_) first = kNullBlock;
  for (const auto& [block, entries] : further_)
    spare_entries_.insert(spare_entries_.end(), entries.begin(), entries.end());
  further_.clear();
}

BlockKey PrefixCache::key_of(BlockId block) const {
  check_block(block, std::ssize(entries_));  // those of further keys too
  const Entry& entry = entries_[block];
  LS_CHECK(entry.group != kNotCached, "block {} is not cached", index_of(block));
  const auto g = static_cast<std::uint64_t>(entry.group);
  return {entry.key.low - g * 0x9E3779B97F4A7C15ull, entry.key.high ^ (g * 0xD1342543DE82EF95ull)};
}

}  // namespace lockstep
