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

// hash-stale: a reallocated block stays findable under its old content until it is published again.
class StalePool final : public BlockPool {
 public:
  using BlockPool::BlockPool;

 protected:
  void hand_out(BlockId) override {}
};

// Defects of every kind's manager: no admission cap, and blocks freed in a wrong order or twice.
template <typename Manager>
class PlantedManager final : public Manager {
 public:
  PlantedManager(SchedulerDefect defect, const KVCacheSpec& spec, std::int32_t group,
                 const EngineConfig& config, BlockSizes sizes, BlockPool& pool)
      : Manager(spec, group, config, sizes, pool), defect_(defect) {
    if (defect == SchedulerDefect::admission_uncapped) this->admission_cap_.reset();
  }

  // free-twice frees only blocks that others still hold: freeing a free block would fail a check at
  // once, and the defect would prove nothing.
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

// common-prefix-overcount: two holders count as all running requests.
class PlantedFullAttention final : public FullAttentionManager {
 public:
  using FullAttentionManager::FullAttentionManager;
  // Compares references with at most 2 instead of with the number of requests.
  std::int32_t num_common_prefix_blocks(const Request& request,
                                        std::int32_t num_requests) const override {
    return FullAttentionManager::num_common_prefix_blocks(request, std::min(num_requests, 2));
  }
};

// free-window-early keeps one token less than the window; hit-window-short accepts a run of blocks
// that does not fill it.
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
  // Rounded down: with window 33 and blocks of 24 tokens 1 block instead of 2.
  std::int32_t num_blocks_of_window() const override {
    if (defect_ != SchedulerDefect::hit_window_short)
      return SlidingWindowManager::num_blocks_of_window();
    return std::max(1, static_cast<std::int32_t>(spec_.sliding_window - 1) / block_size_);
  }

 private:
  SchedulerDefect defect_;
};

// cross-blocks-short: blocks of encoder rows are rounded down, so the last rows have no block.
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

// rswa-window-short: frees a block of generated tokens that the window still reads.
class PlantedReferenceWindow final : public ReferenceWindowManager {
 public:
  // The window is one block shorter.
  PlantedReferenceWindow(KVCacheSpec spec, std::int32_t group, const EngineConfig& config,
                         BlockSizes sizes, BlockPool& pool)
      : ReferenceWindowManager(spec, group, config, sizes, pool) {
    spec_.rswa_window = std::max<std::int64_t>(0, spec.rswa_window - block_size_);
  }
};

// Defects of state groups. state-spec-blocks has no blocks for drafts' states; the others publish a
// state too early, free one too early, or leak one.
class PlantedStates final : public MambaManager {
 public:
  PlantedStates(SchedulerDefect defect, KVCacheSpec spec, std::int32_t group,
                const EngineConfig& config, BlockSizes sizes, BlockPool& pool)
      : MambaManager(spec, group, config, sizes, pool), defect_(defect) {
    if (defect == SchedulerDefect::state_spec_blocks) spec_.num_speculative_blocks = 0;
  }

  void cache_blocks(Request& request, std::int32_t num_tokens) override {
    // state-partial-block publishes a block that is only partly full as full; hit-same-step forgets
    // which states this step has yet to compute.
    const bool rounds_up = defect_ == SchedulerDefect::state_partial_block;
    MambaManager::cache_blocks(request, num_tokens + (rounds_up ? block_size_ - 1 : 0));
    if (defect_ == SchedulerDefect::hit_same_step) cached_this_step_.clear();
  }

 protected:
  // state-freed-early frees the state that the next token reads.
  std::int32_t num_skipped_tokens(std::int32_t num_computed_tokens) const override {
    const bool all = defect_ == SchedulerDefect::state_freed_early;
    return all ? num_computed_tokens : MambaManager::num_skipped_tokens(num_computed_tokens);
  }
  // state-leak-null-gap stops at the first null entry, so states before a gap are never freed.
  void free_retired_states(GroupBlocks& held, std::int32_t num_tokens) override {
    if (defect_ != SchedulerDefect::state_leak_null_gap)
      return MambaManager::free_retired_states(held, num_tokens);
    free_head(held, std::min<std::int64_t>(num_tokens / block_size_, std::ssize(held.blocks)));
  }

 private:
  SchedulerDefect defect_;
};

// Defects of hits and of retirement over all groups.
class PlantedCoordinator final : public KVCacheCoordinator {
 public:
  PlantedCoordinator(SchedulerDefect defect, const EngineConfig& config,
                     std::span<const KVCacheGroupSpec> groups, BlockSizes sizes,
                     std::int64_t num_blocks, const CacheParts& parts)
      : KVCacheCoordinator(config, groups, sizes, num_blocks, parts), defect_(defect) {}

  // refused-hit-kept: a refused request keeps the references of its hit.
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
  // hit-whole-prompt also counts the last token, whose logits are then missing.
  std::int32_t max_hit_tokens(const Request& request) const override {
    if (defect_ == SchedulerDefect::hit_whole_prompt) return request.num_tokens();
    return KVCacheCoordinator::max_hit_tokens(request);
  }

  // hit-longest-group takes the longest group's hit for all groups; hit-one-group-truncated cuts
  // only the first group to the common length.
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

  // hit-untouched-evicted allocates new blocks before the next group's hit has its references.
  void take_hit_of_group(std::size_t group, Request& request, const PrefixHit& hit,
                         const SlotDemand& demand) override {
    KVCacheCoordinator::take_hit_of_group(group, request, hit, demand);
    if (defect_ == SchedulerDefect::hit_untouched_evicted)
      managers_[group]->allocate_new_blocks(request, demand);
  }

  // free-optimistic counts drafts as computed before they are verified.
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

// A defect changes only the kinds that it is about: all other groups get the usual manager.
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
      // Blocks cover the tokens of all ranks, although each rank needs its own copy of them.
      KVCacheSpec shared = spec;
      shared.dcp_sharded = true;
      return CacheParts::manager(shared, group, config, sizes, pool);
    }
    case sinks_given_away:
      // The usual full-attention manager takes no blocks for the sinks, so requests get them.
      if (spec.sink_len == 0) break;
      return std::make_unique<FullAttentionManager>(spec, group, config, sizes, pool);
    case common_prefix_overcount: {
      // Only the plain full-attention manager has the override; subclasses keep theirs.
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

// Defects of host pages: transfers, residency updates, copies or mirrors with one step done wrong.

namespace {

class PlantedPages final : public HostPageCoordinator {
 public:
  PlantedPages(SchedulerDefect defect, const EngineConfig& config, std::unique_ptr<BlockPool> host,
               BlockPool& device)
      : HostPageCoordinator(config, std::move(host), device), defect_(defect) {}

 protected:
  // page-restore-dropped restores nothing; page-host-held-twice never frees a host block;
  // page-copy-unheld frees device blocks while the copy reads them.
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

  // Two defects: updates without lost pages, and without their last page.
  ResidencyUpdate take_residency(Request& request) override {
    if (is(SchedulerDefect::page_loss_untold)) state_of(request)->stale.clear();
    ResidencyUpdate update = HostPageCoordinator::take_residency(request);
    if (!is(SchedulerDefect::page_last_untold) || update.pages.empty()) return update;
    update.pages.pop_back();
    for (std::vector<BlockId>& blocks : update.blocks) blocks.pop_back();
    return update;
  }

  // page-loss-forgotten keeps reading the device block of a lost page.
  void lose_page(const Page& page) override {
    if (!is(SchedulerDefect::page_loss_forgotten)) HostPageCoordinator::lose_page(page);
  }

  // page-copy-stale: the content of a reallocated block still counts as a copy.
  void drop_copy(const CopyKey& key) override {
    if (!is(SchedulerDefect::page_copy_stale)) HostPageCoordinator::drop_copy(key);
  }

  // page-mirror-short omits the last span of a step that crosses a page.
  std::vector<RowMirror> mirrors_of(Request& request, std::int32_t begin,
                                    std::int32_t end) const override {
    std::vector<RowMirror> mirrors = HostPageCoordinator::mirrors_of(request, begin, end);
    if (is(SchedulerDefect::page_mirror_short) && mirrors.size() > 1) mirrors.pop_back();
    return mirrors;
  }

  // page-without-hot-region unpins pages although the request cannot read the host.
  bool can_read_from_host(const Request& request) const override {
    return is(SchedulerDefect::page_without_hot_region) ||
           HostPageCoordinator::can_read_from_host(request);
  }

  // page-all-resident reports that no row is read from the host.
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

// Forgets the request's blocks without freeing them: a leak.
void lose_blocks(Request& request) {
  for (GroupBlocks& held : request.groups) held.clear();
  request.rest = {};
}

// Defects of the scheduler itself: hashes, ends, preemptions, drafts and encoder inputs.
struct PlantedScheduler final : Scheduler::Impl {
  PlantedScheduler(SchedulerDefect planted, const EngineConfig& engine,
                   const std::vector<KVCacheGroupSpec>& groups, BlockSizes sizes,
                   std::int64_t num_blocks, const KVTransfer& transfer, const CacheParts& parts)
      : Impl(engine, groups, sizes, num_blocks, transfer, parts), defect(planted) {
    if (is(SchedulerDefect::state_wrong_boundary)) splits_at_state_blocks = false;
    // Hash blocks of one rank's tokens, for blocks of all ranks' tokens.
    if (is(SchedulerDefect::hash_cp_granularity))
      hash_rule.hash_block_size =
          std::max(1, hash_rule.hash_block_size / (config.dcp * config.pcp));
    if (is(SchedulerDefect::hash_next_token)) hash_rule.num_lookahead_tokens = 0;
  }

  bool is(SchedulerDefect other) const { return defect == other; }

  // hash-extra-keys: requests with different salts, adapters or images share blocks.
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

  // free-preempted-lost leaks a preempted request's blocks; drafts-outlive-preemption keeps its
  // drafts.
  void send_back(RequestId victim, bool drops_stale_output) override {
    Request& request = at(victim);
    if (is(SchedulerDefect::free_preempted_lost)) lose_blocks(request);
    const std::vector<std::int32_t> drafts = request.spec_tokens;
    Impl::send_back(victim, drops_stale_output);
    if (is(SchedulerDefect::drafts_outlive_preemption)) request.spec_tokens = drafts;
  }

  // free-in-flight: the victim stays in the step, and its freed blocks are written.
  void drop_from_output(RequestId id) override {
    if (!is(SchedulerDefect::free_in_flight)) Impl::drop_from_output(id);
  }

  // resume-appended sends only new blocks of a resumed request: the worker keeps the freed ones.
  void emit(RequestId id, std::int32_t num_tokens, Handed handed, bool keeps_drafts) override {
    const bool appends = is(SchedulerDefect::resume_appended) && at(id).num_preemptions > 0 &&
                         handed == Handed::whole_table;
    Impl::emit(id, num_tokens, appends ? Handed::added : handed, keeps_drafts);
  }

  // stale-output-taken delivers output that had to be dropped.
  void update_row(const InFlightRow& row, std::span<const std::int32_t> tokens) override {
    if (is(SchedulerDefect::stale_output_taken)) at(row.id).drops_stale_output = false;
    Impl::update_row(row, tokens);
  }

  // drafts-kept counts rejected drafts as computed.
  void take_back_rejected(Request& request, std::int32_t num_rejected) override {
    if (!is(SchedulerDefect::drafts_kept)) Impl::take_back_rejected(request, num_rejected);
  }

  // encoder-skipped-on-resume: the rows were computed before, but in blocks that now belong to
  // others.
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
