#include "reference/prefix_cache.h"

#include <bit>

#include "reference/check.h"

namespace lockstep {

PrefixCache::PrefixCache(std::int64_t num_blocks)
    : entries_(static_cast<std::size_t>(num_blocks)),
      buckets_(std::bit_ceil(static_cast<std::size_t>(num_blocks) * 3 / 2 + 2)),
      mask_(buckets_.size() - 1) {}

std::size_t PrefixCache::probe(const BlockKey& mixed_key) const {
  const std::uint32_t tag = tag_of(mixed_key);
  std::size_t i = tag & mask_;
  while (buckets_[i].first != kNullBlock &&
         (buckets_[i].tag != tag || !(entries_[at(buckets_[i].first)].key == mixed_key)))
    i = (i + 1) & mask_;
  return i;
}

BlockId PrefixCache::find(const BlockKey& key, std::int32_t group) const {
  return buckets_[probe(mixed(key, group))].first;
}

bool PrefixCache::added_this_step(const BlockKey& key, std::int32_t group) const {
  const Bucket& bucket = buckets_[probe(mixed(key, group))];
  return bucket.first != kNullBlock && bucket.added_in_step == step_;
}

void PrefixCache::add(BlockId block, const BlockKey& key, std::int32_t group) {
  Entry& entry = entries_[at(block)];
  LS_CHECK(block != kNullBlock, "the null block holds nothing");
  LS_CHECK(!entry.cached, "block {} is cached already", index_of(block));
  entry = {mixed(key, group), kNullBlock, kNullBlock, group, true};
  Bucket& bucket = buckets_[probe(entry.key)];
  if (bucket.first == kNullBlock) {
    bucket = {tag_of(entry.key), block, block, step_};
    return;
  }
  entry.previous = bucket.last;
  entries_[at(bucket.last)].next = block;
  bucket.last = block;
  bucket.added_in_step = step_;
}

bool PrefixCache::remove(BlockId block) {
  Entry& entry = entries_[at(block)];
  if (!entry.cached) return false;
  const std::size_t i = probe(entry.key);
  Bucket& bucket = buckets_[i];
  LS_CHECK(bucket.first != kNullBlock, "block {} is in no bucket", index_of(block));
  if (entry.previous != kNullBlock) entries_[at(entry.previous)].next = entry.next;
  if (entry.next != kNullBlock) entries_[at(entry.next)].previous = entry.previous;
  if (bucket.first == block) bucket.first = entry.next;
  if (bucket.last == block) bucket.last = entry.previous;
  entry.cached = false;
  if (bucket.first == kNullBlock) erase_bucket(i);
  return true;
}

// Closes the gap that an emptied bucket leaves in its probe sequence.
void PrefixCache::erase_bucket(std::size_t hole) {
  for (std::size_t i = (hole + 1) & mask_; buckets_[i].first != kNullBlock; i = (i + 1) & mask_) {
    const std::size_t home = buckets_[i].tag & mask_;
    if (((i - home) & mask_) >= ((i - hole) & mask_)) {
      buckets_[hole] = buckets_[i];
      hole = i;
    }
  }
  buckets_[hole] = {};
}

void PrefixCache::clear() {
  for (Entry& entry : entries_) entry.cached = false;
  for (Bucket& bucket : buckets_) bucket = {};
}

BlockKey PrefixCache::key_of(BlockId block) const {
  const Entry& entry = entries_[at(block)];
  LS_CHECK(entry.cached, "block {} is not cached", index_of(block));
  const auto g = static_cast<std::uint64_t>(entry.group);
  return {entry.key.low - g * 0x9E3779B97F4A7C15ull, entry.key.high ^ (g * 0xD1342543DE82EF95ull)};
}

}  // namespace lockstep
