#include "reference/cache/mamba_manager.h"

#include <algorithm>
#include <array>
#include <utility>

#include "base/check.h"

namespace lockstep {

MambaManager::MambaManager(const KVCacheSpec& spec, std::int32_t group, const EngineConfig& config,
                           BlockSizes sizes, BlockPool& pool)
    : GroupManager(spec, group, config, sizes, pool), mode_(spec.mamba_cache_mode) {
  publishes_sparsely_ = retention_interval_ != kDenseRetention;
}

// A hit needs the one state at the place where it ends.
bool MambaManager::is_reachable(const Request& request, std::int32_t index) const {
  const std::int32_t end = (index + 1) * block_size_;
  if (retention_interval_ > 0 &&
      (retention_interval_ <= block_size_ || end % retention_interval_ == 0))
    return true;
  const std::array boundaries = replay_boundaries(request);
  return std::ranges::find(boundaries, end) != boundaries.end();
}

void MambaManager::find_longest_cache_hit(const HitQuery& query,
                                          std::span<const std::int32_t> groups,
                                          std::span<std::vector<BlockId>* const> hits) const {
  for (std::vector<BlockId>* hit : hits) hit->clear();
  std::vector<BlockId> found;
  std::int64_t longest = query.max_length;
  if (query.drop_last_block && profile_.state_hits_drop_a_block) longest -= block_size_;
  for (std::int64_t i = longest / block_size_ - 1; i >= 0; --i) {
    if (!find_block(query, groups, i, found)) continue;
    if ((i + 1) * block_size_ % sizes_.scheduler_block_size != 0) continue;
    for (std::size_t g = 0; g < hits.size(); ++g) {
      hits[g]->assign(static_cast<std::size_t>(i), kNullBlock);
      hits[g]->push_back(found[g]);
    }
    return;
  }
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
  pool_.free_blocks(freed_);
  held.num_retired_blocks = end;
}

void MambaManager::remove_skipped_blocks(Request& request, std::int32_t num_computed_tokens) {
  std::int32_t num_sure = num_computed_tokens;
  // Drafts among the scheduled tokens may still be rejected: count as if all were.
  if (profile_.retire_basis == RetireBasis::scheduled)
    num_sure = std::max(0, num_computed_tokens - num_speculative_blocks());
  GroupBlocks& held = of(request);
  if (mode_ == MambaCacheMode::align && profile_.retires_beyond_null_gaps &&
      !planted(SchedulerDefect::state_leak_null_gap))
    free_retired_states(held, num_skipped_tokens(num_sure));
  else
    GroupManager::remove_skipped_blocks(request, num_sure);
  if (mode_ != MambaCacheMode::align) return;
  // The block of two allocations ago: the one after it has taken its state over.
  const std::int32_t idx = held.last_state_block_idx;
  if (idx < 0 || idx >= ceil_div(num_sure, block_size_) - 1) return;
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
    if (last != kNullBlock && !planted(SchedulerDefect::hit_same_step) &&
        pool_.cache().added_this_step(pool_.cache().key_of(last), group_))
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
  if (num_new > 0) num_new = held.has_state_blocks ? 1 : 1 + num_speculative_blocks();
  return num_new + num_evictable(new_computed_blocks);
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
  // Fewer when drafts of the step before were rejected and this step has fewer of them.
  if (num_required <= num_before) {
    held.has_state_blocks = true;
    return blocks.size();
  }
  if (held.has_state_blocks)
    held.last_state_block_idx = num_before - 1 - num_speculative_blocks();
  else if (num_before > 0)
    held.last_state_block_idx = num_before - 1;  // the hit

  const std::int32_t num_skipped = num_required - num_speculative_blocks() - 1;
  if (num_before < num_skipped) blocks.resize(num_skipped, kNullBlock);
  if (held.has_state_blocks) {
    // The speculative blocks of the step before move on to the new end of the table.
    for (std::int32_t i = num_before - num_speculative_blocks(); i < num_before && i < num_skipped;
         ++i) {
      const BlockId moved = blocks[i];
      blocks.push_back(moved);
      blocks[i] = kNullBlock;
    }
  }
  const std::int64_t num_new = num_required - std::ssize(blocks);
  LS_CHECK(num_new >= 0 && num_new <= (held.has_state_blocks ? 1 : 1 + num_speculative_blocks()),
           "request {} would get {} new state blocks", request.name, num_new);
  pool_.get_new_blocks(num_new, blocks);
  held.has_state_blocks = true;
  return static_cast<std::size_t>(num_before);
}

}  // namespace lockstep
