#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "reference/cache/group_managers.h"
#include "reference/cache/kv_cache_coordinator.h"
#include "reference/cache/page_coordinator.h"
#include "reference/defects/scheduler_defect.h"

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

// Host pages with one step done wrong.

namespace {

class PlantedPages final : public HostPageCoordinator {
 public:
  PlantedPages(SchedulerDefect defect, const EngineConfig& config, std::unique_ptr<BlockPool> host,
               BlockPool& device)
      : HostPageCoordinator(config, std::move(host), device), defect_(defect) {}

 protected:
  bool plan_transfer(const std::shared_ptr<State>& state, std::int32_t page,
                     bool restores) override {
    if (is(SchedulerDefect::page_restore_dropped) && restores) return false;
    if (!HostPageCoordinator::plan_transfer(state, page, restores)) return false;
    Transfer& transfer = pending_.rbegin()->second;
    if (is(SchedulerDefect::page_host_held_twice)) host_pool().touch({&transfer.host, 1});
    if (is(SchedulerDefect::page_copy_unheld))
      device_pool().free_blocks(std::exchange(transfer.resident, {}));
    return true;
  }

  ResidencyUpdate take_residency(Request& request) override {
    if (is(SchedulerDefect::page_loss_untold)) state_of(request)->stale.clear();
    ResidencyUpdate update = HostPageCoordinator::take_residency(request);
    if (!is(SchedulerDefect::page_last_untold) || update.pages.empty()) return update;
    update.pages.pop_back();
    for (std::vector<BlockId>& blocks : update.blocks) blocks.pop_back();
    return update;
  }

  void lose_page(const Page& page) override {
    if (!is(SchedulerDefect::page_loss_forgotten)) HostPageCoordinator::lose_page(page);
  }

  // Content of a reallocated block still counts as a copy.
  void drop_copy(const CopyKey& key) override {
    if (!is(SchedulerDefect::page_copy_stale)) HostPageCoordinator::drop_copy(key);
  }

  std::vector<RowMirror> mirrors_of(Request& request, std::int32_t begin,
                                    std::int32_t end) const override {
    std::vector<RowMirror> mirrors = HostPageCoordinator::mirrors_of(request, begin, end);
    if (is(SchedulerDefect::page_mirror_short) && mirrors.size() > 1) mirrors.pop_back();
    return mirrors;
  }

  bool can_read_from_host(const Request& request) const override {
    return is(SchedulerDefect::page_without_hot_region) ||
           HostPageCoordinator::can_read_from_host(request);
  }

  bool all_resident(std::span<const Row> rows) override {
    return HostPageCoordinator::all_resident(rows) || is(SchedulerDefect::page_all_resident);
  }

 private:
  bool is(SchedulerDefect other) const { return defect_ == other; }

  SchedulerDefect defect_;
};

}  // namespace

std::unique_ptr<HostPageCoordinator> PlantedParts::host_pages(const EngineConfig& config,
                                                              std::unique_ptr<BlockPool> host,
                                                              BlockPool& device) const {
  return std::make_unique<PlantedPages>(defect_, config, std::move(host), device);
}

namespace {

// Drops the request's blocks without freeing them.
void lose_blocks(Request& request) {
  for (GroupBlocks& held : request.groups) held.clear();
  request.rest = {};
}

struct PlantedScheduler final : Scheduler::Impl {
  PlantedScheduler(SchedulerDefect planted, const EngineConfig& engine,
                   const std::vector<KVCacheGroupSpec>& groups, BlockSizes sizes,
                   std::int64_t num_blocks, const KVTransfer& transfer, const CacheParts& parts)
      : Impl(engine, groups, sizes, num_blocks, transfer, parts), defect(planted) {
    if (is(SchedulerDefect::state_wrong_boundary)) splits_at_state_blocks = false;
    // The hash of one rank's tokens for a block of all ranks' tokens.
    if (is(SchedulerDefect::hash_cp_granularity))
      hash_rule.hash_block_size =
          std::max(1, hash_rule.hash_block_size / (config.dcp * config.pcp));
    if (is(SchedulerDefect::hash_next_token)) hash_rule.num_lookahead_tokens = 0;
  }

  bool is(SchedulerDefect other) const { return defect == other; }

  RequestId insert(RequestSpec spec) override {
    if (is(SchedulerDefect::hash_extra_keys)) {
      spec.cache_salt.clear();
      spec.keys = {};
    }
    return Impl::insert(std::move(spec));
  }

  void cancel(RequestId id) override {
    Request& request = at(id);
    if (is(SchedulerDefect::abort_in_flight_kept) && request.num_in_flight_tokens > 0)
      lose_blocks(request);
    // Ends a request a second time while a connector still holds its blocks.
    if (is(SchedulerDefect::abort_twice) && request.status == RequestStatus::finished) {
      waiting.remove(id, request);
      if (remote != nullptr) remote->remove(id, request);
      return retire(id);
    }
    Impl::cancel(id);
  }

  void send_back(RequestId victim, bool drops_stale_output) override {
    Request& request = at(victim);
    if (is(SchedulerDefect::free_preempted_lost)) lose_blocks(request);
    const std::vector<std::int32_t> drafts = request.spec_tokens;
    Impl::send_back(victim, drops_stale_output);
    if (is(SchedulerDefect::drafts_outlive_preemption)) request.spec_tokens = drafts;
  }

  // The victim stays in the step.
  void drop_from_output(RequestId id) override {
    if (!is(SchedulerDefect::free_in_flight)) Impl::drop_from_output(id);
  }

  void emit(RequestId id, std::int32_t num_tokens, Handed handed, bool keeps_drafts) override {
    const bool appends = is(SchedulerDefect::resume_appended) && at(id).num_preemptions > 0 &&
                         handed == Handed::whole_table;
    Impl::emit(id, num_tokens, appends ? Handed::added : handed, keeps_drafts);
  }

  void update_row(const InFlightRow& row, std::span<const std::int32_t> tokens) override {
    if (is(SchedulerDefect::stale_output_taken)) at(row.id).drops_stale_output = false;
    Impl::update_row(row, tokens);
  }

  void take_back_rejected(Request& request, std::int32_t num_rejected) override {
    if (!is(SchedulerDefect::drafts_kept)) Impl::take_back_rejected(request, num_rejected);
  }

  // It was computed before: its rows were in blocks that now belong to others.
  void encode(Request& request) override {
    if (is(SchedulerDefect::encoder_skipped_on_resume) && request.num_preemptions > 0) return;
    Impl::encode(request);
  }

  SchedulerDefect defect;
};

}  // namespace

std::unique_ptr<Scheduler::Impl> PlantedParts::scheduler(
    const EngineConfig& engine, const std::vector<KVCacheGroupSpec>& groups, BlockSizes sizes,
    std::int64_t num_blocks, const KVTransfer& transfer) const {
  return std::make_unique<PlantedScheduler>(defect_, engine, groups, sizes, num_blocks, transfer,
                                            *this);
}

}  // namespace lockstep
