#include <algorithm>
#include <utility>
#include <vector>

#include "reference/cache/kv_cache_coordinator.h"
#include "reference/cache/manager_of.h"
#include "reference/defects/planted_parts.h"

namespace lockstep {
namespace {

// Content is findable until other content is.
class StalePool final : public BlockPool {
 public:
  using BlockPool::BlockPool;

 protected:
  void hand_out(BlockId) override {}
};

// What goes wrong in managers of every kind.
template <typename Manager>
class PlantedManager final : public Manager {
 public:
  PlantedManager(SchedulerDefect defect, const KVCacheSpec& spec, std::int32_t group,
                 const EngineConfig& config, BlockSizes sizes, BlockPool& pool)
      : Manager(spec, group, config, sizes, pool), defect_(defect) {
    if (defect == SchedulerDefect::admission_uncapped) this->admission_cap_.reset();
  }

  void free(Request& request) override {
    GroupBlocks& held = this->of(request);
    std::vector<BlockId> again;
    if (defect_ == SchedulerDefect::free_by_id) std::ranges::sort(held.blocks);
    if (defect_ == SchedulerDefect::free_forward_order) std::ranges::reverse(held.blocks);
    if (defect_ == SchedulerDefect::free_twice) again = held.blocks;
    Manager::free(request);
    std::erase_if(again, [&](BlockId block) { return this->pool_.ref_cnt(block) == 0; });
    this->pool_.free_blocks(again);  // those that others share
  }

 private:
  SchedulerDefect defect_;
};

class PlantedFullAttention final : public FullAttentionManager {
 public:
  using FullAttentionManager::FullAttentionManager;
  // One other holder passes for all of them.
  std::int32_t num_common_prefix_blocks(const Request& request,
                                        std::int32_t num_requests) const override {
    return FullAttentionManager::num_common_prefix_blocks(request, std::min(num_requests, 2));
  }
};

class PlantedWindow final : public SlidingWindowManager {
 public:
  PlantedWindow(SchedulerDefect defect, const KVCacheSpec& spec, std::int32_t group,
                const EngineConfig& config, BlockSizes sizes, BlockPool& pool)
      : SlidingWindowManager(spec, group, config, sizes, pool), defect_(defect) {}

 protected:
  std::int32_t num_retained() const override {
    const std::int32_t all = SlidingWindowManager::num_retained();
    return defect_ == SchedulerDefect::free_window_early ? all - 1 : all;
  }
  // Rounded down.
  std::int32_t num_blocks_of_window() const override {
    if (defect_ != SchedulerDefect::hit_window_short)
      return SlidingWindowManager::num_blocks_of_window();
    return std::max(1, static_cast<std::int32_t>(spec_.sliding_window - 1) / block_size_);
  }

 private:
  SchedulerDefect defect_;
};

// Rounded down.
class PlantedCrossAttention final : public CrossAttentionManager {
 public:
  using CrossAttentionManager::CrossAttentionManager;
  std::size_t allocate_new_blocks(Request& request, const SlotDemand&) override {
    std::vector<BlockId>& blocks = of(request).blocks;
    const std::size_t first_new = blocks.size();
    grow(blocks, static_cast<std::size_t>(request.num_encoder_rows / block_size_));
    return first_new;
  }
};

class PlantedReferenceWindow final : public ReferenceWindowManager {
 public:
  // A block less than the window.
  PlantedReferenceWindow(KVCacheSpec spec, std::int32_t group, const EngineConfig& config,
                         BlockSizes sizes, BlockPool& pool)
      : ReferenceWindowManager(spec, group, config, sizes, pool) {
    spec_.rswa_window = std::max<std::int64_t>(0, spec.rswa_window - block_size_);
  }
};

class PlantedStates final : public MambaManager {
 public:
  PlantedStates(SchedulerDefect defect, KVCacheSpec spec, std::int32_t group,
                const EngineConfig& config, BlockSizes sizes, BlockPool& pool)
      : MambaManager(spec, group, config, sizes, pool), defect_(defect) {
    if (defect == SchedulerDefect::state_spec_blocks) spec_.num_speculative_blocks = 0;
  }

  void cache_blocks(Request& request, std::int32_t num_tokens) override {
    // A block that is full in part passes for full.
    const bool rounds_up = defect_ == SchedulerDefect::state_partial_block;
    MambaManager::cache_blocks(request, num_tokens + (rounds_up ? block_size_ - 1 : 0));
    if (defect_ == SchedulerDefect::hit_same_step) cached_this_step_.clear();
  }

 protected:
  std::int32_t num_skipped_tokens(std::int32_t num_computed_tokens) const override {
    const bool all = defect_ == SchedulerDefect::state_freed_early;
    return all ? num_computed_tokens : MambaManager::num_skipped_tokens(num_computed_tokens);
  }
  void free_retired_states(GroupBlocks& held, std::int32_t num_tokens) override {
    if (defect_ != SchedulerDefect::state_leak_null_gap)
      return MambaManager::free_retired_states(held, num_tokens);
    free_head(held, std::min<std::int64_t>(num_tokens / block_size_, std::ssize(held.blocks)));
  }

 private:
  SchedulerDefect defect_;
};

class PlantedCoordinator final : public KVCacheCoordinator {
 public:
  PlantedCoordinator(SchedulerDefect defect, const EngineConfig& config,
                     std::span<const KVCacheGroupSpec> groups, BlockSizes sizes,
                     std::int64_t num_blocks, const CacheParts& parts)
      : KVCacheCoordinator(config, groups, sizes, num_blocks, parts), defect_(defect) {}

  // A request that is refused keeps its hit.
  bool allocate_slots(Request& request, std::int32_t num_new_tokens,
                      std::int32_t num_lookahead_tokens, const PrefixHit* hit,
                      bool full_sequence_must_fit, std::span<std::size_t> first_new) override {
    if (KVCacheCoordinator::allocate_slots(request, num_new_tokens, num_lookahead_tokens, hit,
                                           full_sequence_must_fit, first_new))
      return true;
    if (defect_ == SchedulerDefect::refused_hit_kept && hit != nullptr)
      for (const std::vector<BlockId>& blocks : hit->blocks) pool_->touch(blocks);
    return false;
  }

 protected:
  std::int32_t max_hit_tokens(const Request& request) const override {
    if (defect_ == SchedulerDefect::hit_whole_prompt) return request.num_tokens();
    return KVCacheCoordinator::max_hit_tokens(request);
  }

  void cut_full_groups(PrefixHit& hit) const override {
    if (defect_ == SchedulerDefect::hit_longest_group && hit.shared_prefix_boundary > 0)
      hit.num_tokens = hit.shared_prefix_boundary;
    const std::vector<std::vector<BlockId>> found = hit.blocks;
    KVCacheCoordinator::cut_full_groups(hit);
    if (defect_ != SchedulerDefect::hit_one_group_truncated) return;
    const auto first = static_cast<std::size_t>(attention_groups_.front().groups.front());
    for (std::size_t group = 0; group < found.size(); ++group)
      if (group != first) hit.blocks[group] = found[group];
  }

  // New blocks are taken before the next group's hit is held.
  void take_hit_of_group(std::size_t group, Request& request, const PrefixHit& hit,
                         const SlotDemand& demand) override {
    KVCacheCoordinator::take_hit_of_group(group, request, hit, demand);
    if (defect_ == SchedulerDefect::hit_untouched_evicted)
      managers_[group]->allocate_new_blocks(request, demand);
  }

  // Drafts count before they are verified.
  std::int32_t num_left_behind(const Request& request,
                               std::int32_t num_computed_tokens) const override {
    if (defect_ == SchedulerDefect::free_optimistic)
      return num_computed_tokens + static_cast<std::int32_t>(request.spec_tokens.size());
    return KVCacheCoordinator::num_left_behind(request, num_computed_tokens);
  }

 private:
  SchedulerDefect defect_;
};

}  // namespace

std::unique_ptr<BlockPool> PlantedParts::pool(std::int64_t num_blocks, bool enable_caching,
                                              FreedBlocks freed_blocks) const {
  if (defect_ == SchedulerDefect::hash_stale)
    return std::make_unique<StalePool>(num_blocks, enable_caching, freed_blocks);
  return CacheParts::pool(num_blocks, enable_caching, freed_blocks);
}

std::unique_ptr<GroupManager> PlantedParts::manager(const KVCacheSpec& spec, std::int32_t group,
                                                    const EngineConfig& config, BlockSizes sizes,
                                                    BlockPool& pool) const {
  using enum SchedulerDefect;
  switch (defect_) {
    case free_by_id:
    case free_forward_order:
    case free_twice:
    case admission_uncapped:
      return with_manager_of(spec.kind, [&]<class Manager>() -> std::unique_ptr<GroupManager> {
        return std::make_unique<PlantedManager<Manager>>(defect_, spec, group, config, sizes, pool);
      });
    case free_window_early:
    case hit_window_short:
      if (!is_sliding_window(spec.kind)) break;
      return std::make_unique<PlantedWindow>(defect_, spec, group, config, sizes, pool);
    case hit_same_step:
    case state_partial_block:
    case state_leak_null_gap:
    case state_spec_blocks:
    case state_freed_early:
      if (!is_state_kind(spec.kind)) break;
      return std::make_unique<PlantedStates>(defect_, spec, group, config, sizes, pool);
    case cross_blocks_short:
      if (!is_cross_attention(spec)) break;
      return std::make_unique<PlantedCrossAttention>(spec, group, config, sizes, pool);
    case rswa_window_short:
      if (spec.rswa_window == 0) break;
      return std::make_unique<PlantedReferenceWindow>(spec, group, config, sizes, pool);
    case whole_blocks_shared: {
      KVCacheSpec shared = spec;
      shared.dcp_sharded = true;
      return CacheParts::manager(shared, group, config, sizes, pool);
    }
    case sinks_given_away:
      if (spec.sink_len == 0) break;
      return std::make_unique<FullAttentionManager>(spec, group, config, sizes, pool);
    case common_prefix_overcount: {
      auto usual = CacheParts::manager(spec, group, config, sizes, pool);
      if (dynamic_cast<FullAttentionManager*>(usual.get()) == nullptr || spec.sink_len > 0 ||
          spec.rswa_window > 0)
        return usual;
      return std::make_unique<PlantedFullAttention>(spec, group, config, sizes, pool);
    }
    default:
      break;
  }
  return CacheParts::manager(spec, group, config, sizes, pool);
}

std::unique_ptr<KVCacheCoordinator> PlantedParts::coordinator(
    const EngineConfig& config, std::span<const KVCacheGroupSpec> groups, BlockSizes sizes,
    std::int64_t num_blocks) const {
  return std::make_unique<PlantedCoordinator>(defect_, config, groups, sizes, num_blocks, *this);
}

}  // namespace lockstep
