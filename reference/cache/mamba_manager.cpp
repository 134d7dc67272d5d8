#include "reference/cache/mamba_manager.h"

#include <algorithm>
#include <array>
#include <utility>

#include "base/check.h"

namespace lockstep {

MambaManager::MambaManager(const KVCacheSpec& spec, std::int32_t group, const EngineConfig& config,
                           BlockSizes sizes, BlockPool& pool)
    : GroupManager(spec, group, config, sizes, pool),
      mode_(spec.mamba_cache_mode),
      publishes_parts_(mode_ == MambaCacheMode::align && profile_.hits_parts_of_blocks) {
  publishes_sparsely_ = retention_interval_ != kDenseRetention;
}

bool MambaManager::is_segment_end(std::int32_t num_tokens) const {
  return retention_interval_ > 0 &&
         (retention_interval_ <= block_size_ || num_tokens % retention_interval_ == 0);
}

// A hit needs the one state at the place where it ends.
bool MambaManager::is_reachable(const Request& request, std::int32_t index) const {
  const std::int32_t end = (index + 1) * block_size_;
  if (is_segment_end(end)) return true;
  return std::ranges::any_of(replay_boundaries(request), [&](std::int32_t boundary) {
    return boundary / block_size_ * block_size_ == end;
  });
}

std::int32_t MambaManager::find_longest_cache_hit(
    const HitQuery& query, std::span<const std::int32_t> groups,
    std::span<std::vector<BlockId>* const> hits) const {
  for (std::vector<BlockId>* hit : hits) hit->clear();
  std::vector<BlockId> found;
  std::int64_t longest = query.max_length;
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
// states.
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
  // Drafts among the scheduled tokens may still be rejected: count as if all were.
  if (profile_.retire_basis == RetireBasis::scheduled)
    num_sure = std::max(0, num_computed_tokens - num_speculative_blocks());
  GroupBlocks& held = of(request);
  if (mode_ == MambaCacheMode::align && profile_.retires_beyond_null_gaps)
    free_retired_states(held, num_skipped_tokens(num_sure));
  else
    GroupManager::remove_skipped_blocks(request, num_sure);
  if (mode_ != MambaCacheMode::align) return;
  // The block of two allocations ago: the one after it has taken its state over.
  const std::int32_t idx = held.last_state_block_idx;
  if (idx < 0 || idx >= ceil_div(num_sure, block_size_) - 1) return;
  LS_CHECK(idx < std::ssize(held.blocks), "{}: state entry {} of {}", request.name, idx,
           held.blocks.size());
  BlockId& entry = held.blocks[idx];
  if (entry == kNullBlock) return;
  pool_.free_blocks({&entry, 1});
  entry = kNullBlock;
}

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
    // A state that another request publishes in this very step is not there yet: the hit waits a
    // step.
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
  const bool copies = held.part_block != kNullBlock ||
                      hits_part(new_computed_blocks, demand.num_local_computed_tokens);
  if (copies) num_new = std::max<std::int64_t>(num_new, 0) + 1;
  const bool exports = demand.apply_admission_cap ? checkpoint_position(request, demand) > 0
                                                  : held.checkpoint_position > 0;
  if (num_new > 0) {
    const std::int64_t most = 1 + (copies ? 1 : 0) + (exports ? 1 : 0) +
                              (held.has_state_blocks ? 0 : num_speculative_blocks());
    num_new = profile_.counts_states_exactly ? std::min(num_new, most) : most;
  }
  return num_new + num_evictable(new_computed_blocks);
}

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
  // Fewer if drafts of the previous step were rejected and this step has fewer drafts.
  if (num_required <= num_before && !copies && num_exported == 0) {
    held.has_state_blocks = true;
    return blocks.size();
  }
  if (held.has_state_blocks)
    held.last_state_block_idx = num_before - 1 - num_speculative_blocks();
  else if (num_before > 0)
    held.last_state_block_idx = num_before - 1;  // the hit

  // Entries that hold no state in this step; a checkpoint is exported into the last of them.
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

// The table of a running request only grows at its end. The request therefore keeps the published
// block, and later hits find the copy.
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

// Publishes the exported state under the hash of its position, or leaves it unpublished if no
// request can look for it.
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
  // Drafts reach beyond what is hashed.
  const std::int32_t num_hashes = position / sizes_.hash_block_size;
  if (num_hashes > std::ssize(request.hashes.keys())) return std::nullopt;
  cache_part(request, block, position, true);
  return request.hashes[num_hashes - 1];
}

// Publishes the running state at the end of the hashed part of the prompt, if this step ends there.
// The next step continues in the block, so the state is copied first.
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
