#include "reference/cache/hisparse_managers.h"

#include <algorithm>

#include "reference/cache/hisparse_coordinator.h"

namespace lockstep {

std::int64_t HiSparseSourceManager::num_blocks_to_allocate(
    const Request& request, std::span<const BlockId> new_computed_blocks,
    const SlotDemand& demand) const {
  const std::int64_t required =
      FullAttentionManager::num_blocks_to_allocate(request, new_computed_blocks, demand);
  return required > pool_.num_free_blocks() ? coordinator_.device_pool().num_blocks() + 1 : 0;
}

void HiSparseSourceManager::allocate_loaded_blocks(Request& request,
                                                   std::int32_t num_computed_tokens, bool zeroes) {
  coordinator_.begin_import(request, num_computed_tokens);
  FullAttentionManager::allocate_loaded_blocks(request, num_computed_tokens, zeroes);
}

void HiSparseSourceManager::cache_blocks(Request& request, std::int32_t num_tokens) {
  coordinator_.publish_when_ready(request, num_tokens);
}

std::vector<BlockId> HiSparseSourceManager::pop(Request& request) {
  coordinator_.detach(request);
  return FullAttentionManager::pop(request);
}

std::vector<BlockKey> HiSparseSourceManager::keys_of(const Request& request,
                                                     std::int32_t num_pages) const {
  std::vector<BlockKey> keys;
  const auto scale = static_cast<std::size_t>(block_size_ / sizes_.hash_block_size);
  for (std::int32_t page = 1; page <= num_pages; ++page)
    keys.push_back(request.hashes[static_cast<std::size_t>(page) * scale - 1]);
  return keys;
}

std::int32_t HiSparseDeviceManager::find_longest_cache_hit(
    const HitQuery&, std::span<const std::int32_t>,
    std::span<std::vector<BlockId>* const> hits) const {
  for (std::vector<BlockId>* hit : hits) hit->clear();
  return 0;
}

// Reads what the host holds: for an import, for a prefix hit, or on request.
std::int64_t HiSparseHotManager::num_blocks_to_allocate(const Request& request,
                                                        std::span<const BlockId>,
                                                        const SlotDemand& demand) const {
  const bool imports = demand.total_computed_tokens > demand.num_local_computed_tokens;
  const bool resumes = demand.num_local_computed_tokens > 0 && of(request).num_cached_blocks < 0;
  if (!imports && !resumes && !required_.contains(&request)) return 0;
  return std::max<std::int64_t>(spec_.blocks_per_request - std::ssize(of(request).blocks), 0);
}

void HiSparseHotManager::take_local_tokens(Request& request, std::int32_t num_local_tokens) {
  if (num_local_tokens > 0 || !coordinator_.has_resident_pages()) require_hot(request);
}

std::size_t HiSparseHotManager::allocate_new_blocks(Request& request, const SlotDemand&) {
  GroupBlocks& held = of(request);
  held.num_cached_blocks = 0;
  const std::size_t first_new = held.blocks.size();
  if (required_.contains(&request))
    grow(held.blocks, static_cast<std::size_t>(spec_.blocks_per_request));
  return first_new;
}

std::vector<BlockId> HiSparseHotManager::pop(Request& request) {
  required_.erase(&request);
  return HiSparseDeviceManager::pop(request);
}

HiSparseResidentManager::HiSparseResidentManager(const KVCacheSpec& spec, std::int32_t group,
                                                 const EngineConfig& config, BlockSizes sizes,
                                                 BlockPool& pool, HiSparseCoordinator& coordinator)
    : HiSparseDeviceManager(spec, group, config, sizes, pool, coordinator) {
  admission_cap_ = ceil_div(max_in_flight_tokens(config), block_size_);
}

std::int64_t HiSparseResidentManager::num_blocks_to_allocate(const Request& request,
                                                             std::span<const BlockId>,
                                                             const SlotDemand& demand) const {
  const std::int64_t num_held = std::ssize(of(request).blocks);
  std::int64_t required = ceil_div(demand.num_tokens, block_size_);
  if (demand.total_computed_tokens > demand.num_local_computed_tokens) {
    const std::int32_t imported = ceil_div(demand.total_computed_tokens, block_size_);
    const bool needs_tail = page(request, imported - 1) == kNullBlock;
    return (needs_tail ? 1 : 0) +
           std::max<std::int64_t>(required - std::max<std::int64_t>(imported, num_held), 0);
  }
  if (demand.apply_admission_cap) required = std::min(required, *admission_cap_);
  const std::int64_t on_host = ceil_div(demand.num_local_computed_tokens, block_size_);
  return std::max<std::int64_t>(required - std::max(num_held, on_host), 0);
}

void HiSparseResidentManager::take_local_tokens(Request& request, std::int32_t num_local_tokens) {
  const std::int32_t on_host = ceil_div(num_local_tokens, block_size_);
  of(request).blocks.assign(static_cast<std::size_t>(on_host), kNullBlock);
  coordinator_.commit_hit(request, on_host);
}

void HiSparseResidentManager::allocate_loaded_blocks(Request& request,
                                                     std::int32_t num_computed_tokens, bool) {
  std::vector<BlockId>& blocks = of(request).blocks;
  const auto tail = static_cast<std::size_t>((num_computed_tokens - 1) / block_size_);
  if (blocks.size() <= tail) blocks.resize(tail + 1, kNullBlock);
  if (page(request, static_cast<std::int32_t>(tail)) != kNullBlock) return;
  std::vector<BlockId> given;
  pool_.get_new_blocks(1, given);
  blocks[tail] = given[0];
}

std::vector<BlockId> HiSparseResidentManager::pop(Request& request) {
  coordinator_.detach(request);
  std::vector<BlockId> blocks;
  for (std::int32_t i = 0; i < num_pages(request); ++i) blocks.push_back(page(request, i));
  changes_.erase(&request);
  of(request).clear();
  return blocks;
}

BlockId HiSparseResidentManager::page(const Request& request, std::int32_t index) const {
  const std::vector<BlockId>& blocks = of(request).blocks;
  if (index < 0 || index >= std::ssize(blocks)) return kNullBlock;
  if (const auto changes = changes_.find(&request); changes != changes_.end())
    if (const auto change = changes->second.find(index); change != changes->second.end())
      return change->second;
  return blocks[static_cast<std::size_t>(index)];
}

bool HiSparseResidentManager::adopt(const Request& request, std::int32_t index, BlockId block) {
  if (index >= num_pages(request) || page(request, index) != kNullBlock) return false;
  changes_[&request][index] = block;
  return true;
}

BlockId HiSparseResidentManager::drop(const Request& request, std::int32_t index) {
  const BlockId block = page(request, index);
  if (block != kNullBlock) changes_[&request][index] = kNullBlock;
  return block;
}

}  // namespace lockstep
