#include "reference/cache/group_managers.h"

#include <algorithm>
#include <utility>

namespace lockstep {
namespace {

// The hits of several groups always have equal lengths, so they are cut together.
void resize_all(std::span<std::vector<BlockId>* const> hits, std::size_t size) {
  for (std::vector<BlockId>* hit : hits) hit->resize(size, kNullBlock);
}

// Removes the last block of every hit, as EAGLE's drop does. REQUIRES: a hit with blocks.
void pop_all(std::span<std::vector<BlockId>* const> hits) {
  LS_CHECK(!hits[0]->empty(), "a hit without blocks is shortened");
  for (std::vector<BlockId>* hit : hits) hit->pop_back();
}

}  // namespace

// Computed in 64 bits: two batches of max_num_batched_tokens may exceed 32.
std::int32_t max_in_flight_tokens(const EngineConfig& config) {
  const bool counts_batches = engine_profile(config.engine).admission_counts_batches_in_flight;
  const std::int64_t num_batches = counts_batches && config.async_scheduling ? 2 : 1;
  return static_cast<std::int32_t>(
      std::min<std::int64_t>(num_batches * config.max_num_batched_tokens, config.max_model_len));
}

namespace {

// Shortens the hits until their length is a multiple of `alignment` tokens. Ends at 0, which is
// one.
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

// Phase 1 finds full blocks from the left; phase 2 extends the hit into the next block if hits may
// end there. EAGLE drops one block, or one hash of a hit that may end inside a block.
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

// Extends a hit of full blocks by the longest cached part of the next block. Tries the longest part
// first. The full block is not tried: it missed already. Example: block_size 64, parts of 16, 2
// full blocks hit: parts that end at 176, 160 and 144 tokens.
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

// Drops one hash of the hit for EAGLE. The rows of a block are append-only, so the last block still
// covers the shorter length; it leaves the table only if nothing of it is left.
std::int32_t FullAttentionManager::cut_dropped_hash(
    const HitQuery& query, std::int32_t length, std::span<std::vector<BlockId>* const> hits) const {
  if (!query.drop_last_block || length == 0) return length;
  length -= alignment_;
  LS_CHECK(length >= 0, "a hit is cut to {} tokens", length);
  resize_all(hits, static_cast<std::size_t>(ceil_div(length, block_size_)));
  return length;
}

// Blocks from the left whose references equal the number of running requests: each of them holds
// the block. A store that also holds a block makes it count as common too early (finding 33).
std::int32_t FullAttentionManager::num_common_prefix_blocks(const Request& request,
                                                            std::int32_t num_requests) const {
  const std::vector<BlockId>& blocks = of(request).blocks;
  const auto end = std::ranges::find_if(
      blocks, [&](BlockId block) { return pool_.ref_cnt(block) != num_requests; });
  return static_cast<std::int32_t>(end - blocks.begin());
}

// Blocks outside all windows are left out of the cache where the release masks them.
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

// With window 4 and 7 computed tokens, the next token 7 reads tokens 4 to 7: 4 tokens are skipped.
std::int32_t SlidingWindowManager::num_skipped_tokens(std::int32_t num_computed_tokens) const {
  return std::max(0, num_computed_tokens - num_retained());
}

// The next block is freed when num_skipped_tokens() reaches its end. Inverts num_skipped_tokens().
std::int32_t SlidingWindowManager::retires_at(std::int32_t num_left_behind) const {
  return num_retained() + (num_skipped_tokens(num_left_behind) / block_size_ + 1) * block_size_;
}

// A hit needs the last window - 1 tokens before its end, so of each segment between two possible
// ends only the last blocks are worth publishing. With dense retention segments end at every hit
// alignment; with a retention interval at its multiples, and at the prompt's replay boundaries.
// Source: SlidingWindowManager.reachable_block_mask().
bool SlidingWindowManager::is_reachable(const Request& request, std::int32_t index) const {
  // Where EAGLE drops a block, a hit needs one more block, and the last one is after that position.
  const std::int32_t shift = drops_last_block_ && profile_.publishes_dropped_blocks ? 1 : 0;
  const std::int32_t tail = ceil_div(window_ - 1, block_size_) + shift;
  const bool dense = retention_interval_ == kDenseRetention;
  const std::int32_t segment = dense ? mask_alignment_ : retention_interval_;
  if (segment > 0) {
    const std::int32_t per_segment = segment / block_size_;
    // The tails of consecutive segments overlap: every block is needed.
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

// Searches from the right and stops at the first run that is long enough: O(blocks) lookups at
// worst. A run may start only where the hit would end at the alignment.
std::int32_t SlidingWindowManager::find_longest_cache_hit(
    const HitQuery& query, std::span<const std::int32_t> groups,
    std::span<std::vector<BlockId>* const> hits) const {
  // EAGLE drops the last block, so the run has one block more.
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
    // Number of blocks that the hit would have if the run ended here.
    const std::int64_t end = query.drop_last_block ? i : i + 1;
    if (num_contiguous == 0 && block_size_ != alignment_ && end * block_size_ % alignment_ != 0)
      continue;
    for (std::size_t g = 0; g < hits.size(); ++g) (*hits[g])[i] = found[g];
    if (++num_contiguous < num_wanted) continue;
    resize_all(hits, static_cast<std::size_t>(i + num_contiguous));
    matched = true;
  }
  if (!matched) {
    // A run from the very left is a hit however short it is: its first token has no window before
    // it.
    resize_all(hits, static_cast<std::size_t>(num_contiguous));
    align_all(hits, block_size_, alignment_);
  }
  // The drop may break the alignment, if blocks are shorter than it.
  if (query.drop_last_block && !hits[0]->empty()) {
    pop_all(hits);
    align_all(hits, block_size_, alignment_);
  }
  return length_of(hits);
}

// Without the extra block that a window has, as ChunkedLocalAttentionSpec of vLLM counts it.
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

// Chunk 8: with 13 computed tokens, tokens 0 to 7 are skipped; with 8, also 0 to 7, since token 8
// begins a chunk; with 7, none.
std::int32_t ChunkedLocalManager::num_skipped_tokens(std::int32_t num_computed_tokens) const {
  return num_computed_tokens / chunk_ * chunk_;
}

// The next chunk's start.
std::int32_t ChunkedLocalManager::retires_at(std::int32_t num_left_behind) const {
  return (num_left_behind / chunk_ + 1) * chunk_;
}

// The chunk is that of token max_length. Blocks before it count as hit even if its first block
// misses.
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

// The demand's tokens do not matter.
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

// Takes the sinks' blocks from the pool for good, as SinkFullAttentionManager of vLLM does before
// any request. They are blocks 1, 2, ... because the pool is new.
SinkAttentionManager::SinkAttentionManager(const KVCacheSpec& spec, std::int32_t group,
                                           const EngineConfig& config, BlockSizes sizes,
                                           BlockPool& pool)
    : FullAttentionManager(spec, group, config, sizes, pool) {
  LS_CHECK(spec.sink_len % spec.block_size == 0, "{} sink tokens in blocks of {}", spec.sink_len,
           spec.block_size);
  std::vector<BlockId> taken;
  pool_.get_new_blocks(spec.sink_len / spec.block_size, taken);
}

// Frees whole blocks in [end of the prompt, start of the window), from the right up to the first
// null entry.
void ReferenceWindowManager::remove_skipped_blocks(Request& request,
                                                   std::int32_t num_computed_tokens) {
  const std::int32_t window_begin =
      std::max(request.num_prompt_tokens(),
               num_computed_tokens - static_cast<std::int32_t>(spec_.rswa_window));
  GroupBlocks& held = of(request);
  free_range(held, gap_begin(request),
             std::min<std::int64_t>(window_begin / block_size_, std::ssize(held.blocks)));
}

// The next block of the gap is freed once the window has left it.
void ReferenceWindowManager::narrow(const Request& request, std::int32_t num_left_behind,
                                    TableRest& rest) const {
  FullAttentionManager::narrow(request, num_left_behind, rest);
  const auto window = static_cast<std::int32_t>(spec_.rswa_window);
  const std::int32_t next =
      std::max(gap_begin(request), (num_left_behind - window) / block_size_) + 1;
  rest.retires_at = std::min(rest.retires_at, next * block_size_ + window);
}

// Parts are published only in mode align: other modes have no state inside a block.
MambaManager::MambaManager(const KVCacheSpec& spec, std::int32_t group, const EngineConfig& config,
                           BlockSizes sizes, BlockPool& pool)
    : GroupManager(spec, group, config, sizes, pool),
      mode_(spec.mamba_cache_mode),
      publishes_parts_(mode_ == MambaCacheMode::align && profile_.hits_parts_of_blocks) {
  publishes_sparsely_ = retention_interval_ != kDenseRetention;
}

// With an interval no longer than a block, every block ends a segment.
bool MambaManager::is_segment_end(std::int32_t num_tokens) const {
  return retention_interval_ > 0 &&
         (retention_interval_ <= block_size_ || num_tokens % retention_interval_ == 0);
}

// A hit needs only the one state at its end, so segments keep one state each. Source:
// MambaManager.reachable_block_mask().
bool MambaManager::is_reachable(const Request& request, std::int32_t index) const {
  const std::int32_t end = (index + 1) * block_size_;
  if (is_segment_end(end)) return true;
  return std::ranges::any_of(replay_boundaries(request), [&](std::int32_t boundary) {
    return boundary / block_size_ * block_size_ == end;
  });
}

// Searches from the right for one cached state, at block boundaries or, where parts are hit, at
// hash boundaries. All entries before it are null: a state needs nothing before itself.
std::int32_t MambaManager::find_longest_cache_hit(
    const HitQuery& query, std::span<const std::int32_t> groups,
    std::span<std::vector<BlockId>* const> hits) const {
  for (std::vector<BlockId>* hit : hits) hit->clear();
  std::vector<BlockId> found;
  std::int64_t longest = query.max_length;
  // Repair of finding 1: no release drops a block of a state's hit.
  if (query.drop_last_block && profile_.state_hits_drop_a_block) longest -= block_size_;
  const std::int64_t unit = std::min(alignment_, block_size_);
  const std::int64_t num_hashes = std::ssize(query.hashes.keys());
  for (std::int64_t end = std::min(longest, num_hashes * sizes_.hash_block_size) / unit * unit;
       end > 0; end -= unit) {
    if (!find_key(query.hashes[end / sizes_.hash_block_size - 1], groups, found)) continue;
    if (alignment_ > block_size_ && end % alignment_ != 0) continue;
    for (std::size_t g = 0; g < hits.size(); ++g) {
      hits[g]->assign(static_cast<std::size_t>((end - 1) / block_size_), kNullBlock);
      hits[g]->push_back(found[g]);
    }
    return static_cast<std::int32_t>(end);
  }
  return 0;
}

// Frees the states of the first num_tokens tokens. A prefill leaves null entries between saved
// states, so the loop does not stop at one; num_retired_blocks keeps it from scanning the head
// again.
void MambaManager::free_retired_states(GroupBlocks& held, std::int32_t num_tokens) {
  const std::int32_t end =
      std::min(num_tokens / block_size_, static_cast<std::int32_t>(held.blocks.size()));
  if (end <= held.num_retired_blocks) return;
  freed_.clear();
  for (std::int32_t i = end - 1; i >= held.num_retired_blocks; --i) {
    BlockId& entry = held.blocks[i];
    if (entry != kNullBlock) freed_.push_back(std::exchange(entry, kNullBlock));
  }
  pool_.free_blocks(freed_, true);
  LS_CHECK(end <= std::ssize(held.blocks), "{} of {} entries retired", end, held.blocks.size());
  held.num_retired_blocks = end;
}

void MambaManager::remove_skipped_blocks(Request& request, std::int32_t num_computed_tokens) {
  std::int32_t num_sure = num_computed_tokens;
  // Drafts among the scheduled tokens may be rejected: counts as if all were.
  if (profile_.retire_basis == RetireBasis::scheduled)
    num_sure = std::max(0, num_computed_tokens - num_speculative_blocks());
  GroupBlocks& held = of(request);
  if (mode_ == MambaCacheMode::align && profile_.retires_beyond_null_gaps)
    free_retired_states(held, num_skipped_tokens(num_sure));
  else
    GroupManager::remove_skipped_blocks(request, num_sure);
  if (mode_ != MambaCacheMode::align) return;
  // The block of two allocations ago: the block after it has received its state by copy.
  const std::int32_t idx = held.last_state_block_idx;
  if (idx < 0 || idx >= ceil_div(num_sure, block_size_) - 1) return;
  LS_CHECK(idx < std::ssize(held.blocks), "{}: state entry {} of {}", request.name, idx,
           held.blocks.size());
  BlockId& entry = held.blocks[idx];
  if (entry == kNullBlock) return;
  pool_.free_blocks({&entry, 1});
  entry = kNullBlock;
}

// block_size differs between the count (the spec's) and the allocation (over all ranks), as in
// vLLM.
SlotDemand MambaManager::with_speculative_blocks(const SlotDemand& demand,
                                                 std::int64_t block_size) const {
  SlotDemand grown = demand;
  grown.num_tokens += static_cast<std::int32_t>(block_size) * num_speculative_blocks();
  return grown;
}

std::int64_t MambaManager::num_blocks_to_allocate(const Request& request,
                                                  std::span<const BlockId> new_computed_blocks,
                                                  const SlotDemand& demand) const {
  if (!new_computed_blocks.empty()) {
    // A state that another request publishes in this step does not exist yet. More blocks than the
    // pool owns make the hit wait for the next step (vLLM: get_num_blocks_to_allocate()).
    const BlockId last = new_computed_blocks.back();
    if (last != kNullBlock &&
        std::ranges::find(cached_this_step_, pool_.cache().key_of(last)) != cached_this_step_.end())
      return pool_.num_blocks() + 1;
  }
  if (mode_ != MambaCacheMode::align)
    return GroupManager::num_blocks_to_allocate(request, new_computed_blocks,
                                                with_speculative_blocks(demand, spec_.block_size));
  // Draft models have no state layers: lookahead tokens need no state.
  const GroupBlocks& held = of(request);
  std::int64_t num_new = ceil_div(demand.num_tokens_main_model, block_size_) +
                         num_speculative_blocks() - std::ssize(new_computed_blocks) -
                         std::ssize(held.blocks);
  // A part that is shared, by this hit or by an earlier publication, costs a block for its copy.
  const bool copies = held.part_block != kNullBlock ||
                      hits_part(new_computed_blocks, demand.num_local_computed_tokens);
  if (copies) num_new = std::max<std::int64_t>(num_new, 0) + 1;
  // Admission asks for the whole prompt, a step for the chunk that prepare_allocation() has seen.
  const bool exports = demand.apply_admission_cap ? checkpoint_position(request, demand) > 0
                                                  : held.checkpoint_position > 0;
  if (num_new > 0) {
    // Null entries of a long prefill cost nothing, so at most these blocks are new: the running
    // state, a copy, a checkpoint, and the speculative blocks in the first step.
    const std::int64_t most = 1 + (copies ? 1 : 0) + (exports ? 1 : 0) +
                              (held.has_state_blocks ? 0 : num_speculative_blocks());
    num_new = profile_.counts_states_exactly ? std::min(num_new, most) : most;
  }
  return num_new + num_evictable(new_computed_blocks);
}

// The scheduler decides with the same rule whether to end the chunk elsewhere
// (StateChunkRule::exports_state()).
std::int32_t MambaManager::checkpoint_position(const Request& request,
                                               const SlotDemand& demand) const {
  if (mode_ != MambaCacheMode::align || spec_.num_prefill_checkpoint_blocks == 0) return 0;
  const std::int32_t end = demand.num_tokens_main_model;
  if (end < demand.prefill_end) return 0;
  const std::int32_t position = hit_end_.last_position(end, alignment_);
  if (!exports_checkpoint(
          {.begin = demand.total_computed_tokens,
           .end = end,
           .position = position,
           .hash_block_size = sizes_.hash_block_size,
           .state_block_size = block_size_,
           .alignment = static_cast<std::int32_t>(spec_.prefill_checkpoint_alignment)}))
    return 0;
  // The entry must be the request's own: none yet, or a speculative block of it.
  const GroupBlocks& held = of(request);
  const std::int32_t entry = ceil_div(end, block_size_) - 2;
  const auto num_held = static_cast<std::int32_t>(held.blocks.size());
  const bool is_own = entry >= num_held || held.blocks[entry] == kNullBlock ||
                      (held.has_state_blocks && entry >= num_held - num_speculative_blocks());
  return is_own ? position : 0;
}

// Fixes the checkpoint for this step: the count, the allocation and cache_blocks() read it.
void MambaManager::prepare_allocation(Request& request, const SlotDemand& demand) const {
  GroupBlocks& held = of(request);
  held.checkpoint_position = checkpoint_position(request, demand);
  held.checkpoint_idx = ceil_div(demand.num_tokens_main_model, block_size_) - 2;
}

std::size_t MambaManager::allocate_new_blocks(Request& request, const SlotDemand& demand) {
  if (mode_ != MambaCacheMode::align)
    return GroupManager::allocate_new_blocks(request, with_speculative_blocks(demand, block_size_));
  return allocate_aligned(request, demand.num_tokens_main_model);
}

std::size_t MambaManager::allocate_aligned(Request& request, std::int32_t num_tokens) {
  GroupBlocks& held = of(request);
  std::vector<BlockId>& blocks = held.blocks;
  const auto num_before = static_cast<std::int32_t>(blocks.size());
  const std::int32_t num_required = ceil_div(num_tokens, block_size_) + num_speculative_blocks();
  const std::int32_t num_exported = held.checkpoint_position > 0 ? 1 : 0;
  const bool copies = held.part_block != kNullBlock;
  // The table may be longer than required if drafts of the previous step were rejected and this
  // step has fewer drafts.
  if (num_required <= num_before && !copies && num_exported == 0) {
    held.has_state_blocks = true;
    return blocks.size();
  }
  // The entry of the current running state; remove_skipped_blocks() frees it after the next
  // allocation.
  if (held.has_state_blocks)
    held.last_state_block_idx = num_before - 1 - num_speculative_blocks();
  else if (num_before > 0)
    held.last_state_block_idx = num_before - 1;  // the hit

  // Entries that hold no state in this step. The last of them is the checkpoint's, if there is one.
  const std::int32_t num_skipped = num_required - num_speculative_blocks() - 1 - num_exported;
  if (num_before < num_skipped) blocks.resize(num_skipped, kNullBlock);
  if (held.has_state_blocks) {
    // The speculative blocks of the previous step move to the new end of the table.
    for (std::int32_t i = num_before - num_speculative_blocks(); i < num_before && i < num_skipped;
         ++i) {
      const BlockId moved = blocks[i];
      blocks.push_back(moved);
      blocks[i] = kNullBlock;
    }
  }
  // Without the copy, which takes its block first, as in vLLM's order of allocation.
  const std::int64_t num_new = std::max<std::int64_t>(num_required - std::ssize(blocks), 0);
  LS_CHECK(num_new <= 1 + num_exported + (held.has_state_blocks ? 0 : num_speculative_blocks()),
           "request {} would get {} new state blocks", request.name, num_new);
  if (copies) {
    std::vector<BlockId> copy;
    pool_.get_new_blocks(1, copy);
    if (held.has_state_blocks)
      move_part(held, copy[0]);
    else
      replace_part(held, copy[0]);
  }
  pool_.get_new_blocks(num_new, blocks);
  LS_CHECK(std::ssize(blocks) >= num_required, "{} has {} state entries, {} are required",
           request.name, blocks.size(), num_required);
  held.has_state_blocks = true;
  return static_cast<std::size_t>(num_before);
}

// The worker's table of a running request is append-only, so the request keeps the published block
// and later hits find the copy. The copy runs before the step overwrites the block.
void MambaManager::move_part(GroupBlocks& held, BlockId copy) {
  const BlockId source = held.part_block;
  LS_CHECK(held.blocks[held.part_idx] == source, "entry {} is block {}, known {}", held.part_idx,
           index_of(held.blocks[held.part_idx]), index_of(source));
  pool_.move_keys(source, copy);
  copies_.push_back({source, copy});
  pool_.touch({&source, 1});
  if (pool_.is_cached(copy)) cached_this_step_.push_back(pool_.cache().key_of(copy));
  held.part_block = kNullBlock;
}

// Publishes full blocks, then the checkpoint or the prompt's end. Every key that is new in this
// step goes to cached_this_step_.
void MambaManager::cache_blocks(Request& request, std::int32_t num_tokens) {
  const std::int32_t first = std::max(of(request).num_cached_blocks, 0);
  GroupManager::cache_blocks(request, num_tokens);
  const std::int32_t end = std::max(of(request).num_cached_blocks, 0);
  if (publishes_parts_) {
    const std::optional<BlockKey> key = of(request).checkpoint_position > 0
                                            ? cache_checkpoint(request)
                                            : cache_prompt_state(request, num_tokens);
    if (key) cached_this_step_.push_back(*key);
  }
  for (std::int32_t i = first; i < end; ++i) {
    const BlockId block = of(request).blocks[i];
    if (block != kNullBlock && pool_.is_cached(block))
      cached_this_step_.push_back(pool_.cache().key_of(block));
  }
}

// Publishes the exported state under the hash of its position, or withdraws the block if no request
// can look for it: the entry may have been published as a full block earlier in this step, and the
// export overwrites that state.
std::optional<BlockKey> MambaManager::cache_checkpoint(const Request& request) {
  const GroupBlocks& held = of(request);
  const std::int32_t position = held.checkpoint_position;
  LS_CHECK(held.checkpoint_idx >= 0 && held.checkpoint_idx < std::ssize(held.blocks),
           "{}: checkpoint entry {} of {}", request.name, held.checkpoint_idx, held.blocks.size());
  const BlockId block = held.blocks[held.checkpoint_idx];
  const bool ends_prompt =
      position == hit_end_.last_position(request.num_prompt_tokens(), alignment_);
  const bool is_retained = position % block_size_ == 0 &&
                           (retention_interval_ == kDenseRetention || is_segment_end(position));
  if (!ends_prompt && !is_retained && position != request.shared_prefix_boundary) {
    pool_.evict_blocks({&block, 1});
    return std::nullopt;
  }
  if (block == kNullBlock) return std::nullopt;
  if (pool_.is_cached(block) && pool_.cache().num_tokens_of(block) == position) return std::nullopt;
  // Drafts may reach past the hashed tokens.
  const std::int32_t num_hashes = position / sizes_.hash_block_size;
  if (num_hashes > std::ssize(request.hashes.keys())) return std::nullopt;
  cache_part(request, block, position, true);
  return request.hashes[num_hashes - 1];
}

// Publishes the running state at the last hash boundary of the prompt, if this step ends there. The
// next step continues in that block, so its content is copied first: part_block marks it.
std::optional<BlockKey> MambaManager::cache_prompt_state(Request& request,
                                                         std::int32_t num_tokens) {
  if (num_tokens <= 0 ||
      num_tokens != hit_end_.last_part(request.num_prompt_tokens(), sizes_.hash_block_size))
    return std::nullopt;
  if (hit_end_.prompt_ends == PromptEnds::at_length && num_tokens % block_size_ == 0)
    return std::nullopt;  // a full block, published as such
  GroupBlocks& held = of(request);
  const std::int32_t entry = ceil_div(num_tokens, block_size_) - 1;
  if (entry >= std::ssize(held.blocks) || held.blocks[entry] == kNullBlock) return std::nullopt;
  const BlockId block = held.blocks[entry];
  // Releases before 0.33.0 publish a known state again, and every hit on it waits a step.
  const bool is_known = pool_.is_cached(block) && pool_.cache().num_tokens_of(block) == num_tokens;
  if (is_known && !profile_.republishes_states) return std::nullopt;
  cache_part(request, block, num_tokens, false);
  if (num_tokens % block_size_ != 0) {
    held.part_idx = entry;
    held.part_block = block;
    held.num_cached_blocks = entry;
  }
  return request.hashes[num_tokens / sizes_.hash_block_size - 1];
}

}  // namespace lockstep
