#include "reference/cache/attention_managers.h"

#include <algorithm>

#include "base/check.h"

namespace lockstep {
namespace {

void resize_all(std::span<std::vector<BlockId>* const> hits, std::size_t size) {
  for (std::vector<BlockId>* hit : hits) hit->resize(size, kNullBlock);
}

void pop_all(std::span<std::vector<BlockId>* const> hits) {
  LS_CHECK(!hits[0]->empty(), "a hit without blocks is shortened");
  for (std::vector<BlockId>* hit : hits) hit->pop_back();
}

}  // namespace

std::int32_t max_in_flight_tokens(const EngineConfig& config) {
  const bool counts_batches = engine_profile(config.engine).admission_counts_batches_in_flight;
  const std::int64_t num_batches = counts_batches && config.async_scheduling ? 2 : 1;
  return static_cast<std::int32_t>(
      std::min<std::int64_t>(num_batches * config.max_num_batched_tokens, config.max_model_len));
}

namespace {

// Shortens the hits until they are a multiple of the alignment.
void align_all(std::span<std::vector<BlockId>* const> hits, std::int64_t block_size,
               std::int64_t alignment) {
  if (block_size == alignment) return;
  LS_CHECK(alignment > 0, "hits are multiples of {} tokens", alignment);
  while (std::ssize(*hits[0]) * block_size % alignment != 0) pop_all(hits);
}

}  // namespace

FullAttentionManager::FullAttentionManager(const KVCacheSpec& spec, std::int32_t group,
                                           const EngineConfig& config, BlockSizes sizes,
                                           BlockPool& pool)
    : GroupManager(spec, group, config, sizes, pool) {
  caches_prompt_tails_ = profile_.caches_prompt_tails;
}

std::int32_t FullAttentionManager::find_longest_cache_hit(
    const HitQuery& query, std::span<const std::int32_t> groups,
    std::span<std::vector<BlockId>* const> hits) const {
  resize_all(hits, 0);
  std::vector<BlockId> found;
  const std::int64_t max_blocks = max_num_blocks(query);
  for (std::int64_t i = 0; i < max_blocks && find_block(query, groups, i, found); ++i)
    for (std::size_t g = 0; g < hits.size(); ++g) hits[g]->push_back(found[g]);
  if (alignment_ < block_size_) return extend_into_block(query, groups, hits);
  if (query.drop_last_block && !hits[0]->empty()) pop_all(hits);
  align_all(hits, block_size_, alignment_);
  return length_of(hits);
}

// The longest cached part of the block after the full blocks of a hit.
std::int32_t FullAttentionManager::extend_into_block(
    const HitQuery& query, std::span<const std::int32_t> groups,
    std::span<std::vector<BlockId>* const> hits) const {
  std::vector<BlockId> found;
  LS_CHECK(block_size_ % alignment_ == 0, "blocks of {} tokens in parts of {}", block_size_,
           alignment_);
  const std::int64_t num_parts = block_size_ / alignment_;
  const std::int64_t first = std::ssize(*hits[0]) * num_parts;
  const std::int64_t end =
      std::min({first + num_parts - 1, std::int64_t{query.max_length} / alignment_,
                std::ssize(query.hashes.keys())});
  for (std::int64_t i = end - 1; i >= first; --i) {
    if (!find_key(query.hashes[i], groups, found)) continue;
    for (std::size_t g = 0; g < hits.size(); ++g) hits[g]->push_back(found[g]);
    return cut_dropped_hash(query, static_cast<std::int32_t>((i + 1) * alignment_), hits);
  }
  return cut_dropped_hash(query, length_of(hits), hits);
}

// EAGLE drops one hash of a hit that may end inside a block.
std::int32_t FullAttentionManager::cut_dropped_hash(
    const HitQuery& query, std::int32_t length, std::span<std::vector<BlockId>* const> hits) const {
  if (!query.drop_last_block || length == 0) return length;
  length -= alignment_;
  LS_CHECK(length >= 0, "a hit is cut to {} tokens", length);
  resize_all(hits, static_cast<std::size_t>(ceil_div(length, block_size_)));
  return length;
}

std::int32_t FullAttentionManager::num_common_prefix_blocks(const Request& request,
                                                            std::int32_t num_requests) const {
  const std::vector<BlockId>& blocks = of(request).blocks;
  const auto end = std::ranges::find_if(
      blocks, [&](BlockId block) { return pool_.ref_cnt(block) != num_requests; });
  return static_cast<std::int32_t>(end - blocks.begin());
}

SlidingWindowManager::SlidingWindowManager(const KVCacheSpec& spec, std::int32_t group,
                                           const EngineConfig& config, BlockSizes sizes,
                                           BlockPool& pool)
    : GroupManager(spec, group, config, sizes, pool),
      window_(static_cast<std::int32_t>(spec.sliding_window)) {
  LS_CHECK(window_ > 0, "group {} has a window of {} tokens", group, window_);
  publishes_sparsely_ = profile_.masks_windows_at_block_alignment ||
                        retention_interval_ != kDenseRetention ||
                        (profile_.publishes_reachable_blocks_only && alignment_ > block_size_);
  const std::int32_t num_tokens =
      std::min(num_retained() + max_in_flight_tokens(config), config.max_model_len);
  // One block more: a window may start inside a block.
  admission_cap_ = ceil_div(num_tokens, block_size_) + 1;
}

std::int32_t SlidingWindowManager::num_skipped_tokens(std::int32_t num_computed_tokens) const {
  return std::max(0, num_computed_tokens - num_retained());
}

std::int32_t SlidingWindowManager::retires_at(std::int32_t num_left_behind) const {
  return num_retained() + (num_skipped_tokens(num_left_behind) / block_size_ + 1) * block_size_;
}

// A hit needs the last window - 1 tokens before the place where it ends.
bool SlidingWindowManager::is_reachable(const Request& request, std::int32_t index) const {
  // Where EAGLE drops a block, a hit needs one more block, and the last one is after that position.
  const std::int32_t shift = drops_last_block_ && profile_.publishes_dropped_blocks ? 1 : 0;
  const std::int32_t tail = ceil_div(window_ - 1, block_size_) + shift;
  const bool dense = retention_interval_ == kDenseRetention;
  const std::int32_t segment = dense ? mask_alignment_ : retention_interval_;
  if (segment > 0) {
    const std::int32_t per_segment = segment / block_size_;
    if (tail >= per_segment) return true;
    if (index >= shift && (index - shift) % per_segment >= per_segment - tail) return true;
  }
  if (dense) return false;
  for (const std::int32_t boundary : replay_boundaries(request)) {
    const std::int32_t end = boundary / block_size_ + shift;
    if (index >= end - tail && index < end) return true;
  }
  return false;
}

std::int32_t SlidingWindowManager::find_longest_cache_hit(
    const HitQuery& query, std::span<const std::int32_t> groups,
    std::span<std::vector<BlockId>* const> hits) const {
  // To drop a last block, one more is matched.
  const std::int64_t num_wanted = num_blocks_of_window() + (query.drop_last_block ? 1 : 0);
  const std::int64_t max_blocks = max_num_blocks(query);
  for (std::vector<BlockId>* hit : hits)
    hit->assign(static_cast<std::size_t>(max_blocks), kNullBlock);
  std::vector<BlockId> found;
  std::int64_t num_contiguous = 0;
  bool matched = false;
  for (std::int64_t i = max_blocks - 1; i >= 0 && !matched; --i) {
    if (!find_block(query, groups, i, found)) {
      num_contiguous = 0;
      continue;
    }
    const std::int64_t end = query.drop_last_block ? i : i + 1;
    if (num_contiguous == 0 && block_size_ != alignment_ && end * block_size_ % alignment_ != 0)
      continue;
    for (std::size_t g = 0; g < hits.size(); ++g) (*hits[g])[i] = found[g];
    if (++num_contiguous < num_wanted) continue;
    resize_all(hits, static_cast<std::size_t>(i + num_contiguous));
    matched = true;
  }
  if (!matched) {
    // A run from the very left is a hit however short it is.
    resize_all(hits, static_cast<std::size_t>(num_contiguous));
    align_all(hits, block_size_, alignment_);
  }
  if (query.drop_last_block && !hits[0]->empty()) {
    pop_all(hits);
    align_all(hits, block_size_, alignment_);
  }
  return length_of(hits);
}

ChunkedLocalManager::ChunkedLocalManager(const KVCacheSpec& spec, std::int32_t group,
                                         const EngineConfig& config, BlockSizes sizes,
                                         BlockPool& pool)
    : GroupManager(spec, group, config, sizes, pool),
      chunk_(static_cast<std::int32_t>(spec.attention_chunk_size)) {
  LS_CHECK(chunk_ > 0, "group {} has chunks of {} tokens", group, chunk_);
  const std::int32_t num_tokens =
      std::min(chunk_ + max_in_flight_tokens(config), config.max_model_len);
  admission_cap_ = ceil_div(num_tokens, block_size_);
}

std::int32_t ChunkedLocalManager::num_skipped_tokens(std::int32_t num_computed_tokens) const {
  return num_computed_tokens / chunk_ * chunk_;
}

std::int32_t ChunkedLocalManager::retires_at(std::int32_t num_left_behind) const {
  return (num_left_behind / chunk_ + 1) * chunk_;
}

std::int32_t ChunkedLocalManager::find_longest_cache_hit(
    const HitQuery& query, std::span<const std::int32_t> groups,
    std::span<std::vector<BlockId>* const> hits) const {
  const std::int64_t max_blocks = max_num_blocks(query);
  const std::int64_t first_in_chunk = query.max_length / chunk_ * chunk_ / block_size_;
  for (std::vector<BlockId>* hit : hits)
    hit->assign(static_cast<std::size_t>(first_in_chunk), kNullBlock);
  std::vector<BlockId> found;
  for (std::int64_t i = first_in_chunk; i < max_blocks && find_block(query, groups, i, found); ++i)
    for (std::size_t g = 0; g < hits.size(); ++g) hits[g]->push_back(found[g]);
  return length_of(hits);
}

std::int64_t UncachedManager::num_blocks_to_allocate(const Request& request,
                                                     std::span<const BlockId>,
                                                     const SlotDemand&) const {
  return std::max<std::int64_t>(num_blocks_of(request) - std::ssize(of(request).blocks), 0);
}

std::size_t UncachedManager::allocate_new_blocks(Request& request, const SlotDemand&) {
  std::vector<BlockId>& blocks = of(request).blocks;
  const std::size_t first_new = blocks.size();
  grow(blocks, static_cast<std::size_t>(num_blocks_of(request)));
  return first_new;
}

std::int32_t UncachedManager::find_longest_cache_hit(
    const HitQuery&, std::span<const std::int32_t>,
    std::span<std::vector<BlockId>* const> hits) const {
  resize_all(hits, 0);
  return 0;
}

SinkAttentionManager::SinkAttentionManager(const KVCacheSpec& spec, std::int32_t group,
                                           const EngineConfig& config, BlockSizes sizes,
                                           BlockPool& pool)
    : FullAttentionManager(spec, group, config, sizes, pool) {
  LS_CHECK(spec.sink_len % spec.block_size == 0, "{} sink tokens in blocks of {}", spec.sink_len,
           spec.block_size);
  std::vector<BlockId> taken;
  pool_.get_new_blocks(spec.sink_len / spec.block_size, taken);
}

void ReferenceWindowManager::remove_skipped_blocks(Request& request,
                                                   std::int32_t num_computed_tokens) {
  const std::int32_t window_begin =
      std::max(request.num_prompt_tokens(),
               num_computed_tokens - static_cast<std::int32_t>(spec_.rswa_window));
  GroupBlocks& held = of(request);
  free_range(held, gap_begin(request),
             std::min<std::int64_t>(window_begin / block_size_, std::ssize(held.blocks)));
}

void ReferenceWindowManager::narrow(const Request& request, std::int32_t num_left_behind,
                                    TableRest& rest) const {
  FullAttentionManager::narrow(request, num_left_behind, rest);
  const auto window = static_cast<std::int32_t>(spec_.rswa_window);
  const std::int32_t next =
      std::max(gap_begin(request), (num_left_behind - window) / block_size_) + 1;
  rest.retires_at = std::min(rest.retires_at, next * block_size_ + window);
}

}  // namespace lockstep
