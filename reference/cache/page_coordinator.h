// Pages of sparse attention between a host pool and the device. Device pages are a write-back cache
// of host pages. Source of the rules: reference/types/host_pages.h.
//
// Invariants
// (1) A page is dirty (only the device has it), clean (the host copy is complete), or unpinned:
//     clean, still read on the device, and free for the pool to allocate. Once reallocated, the
//     page is read from the host.
// (2) Only a request with a hot region reads from the host, and only such a request unpins pages.
//     Its last kActiveTailPages stay pinned.
// (3) A page in flight holds one reference to its host block and one to each device block.
// (4) A page is published under its hash when it and all previous pages are on the host.
//
// Not modelled: copies of host blocks for hits that end inside a block. No group with such hits
// exists in an engine with such pages.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "reference/cache/block_pool.h"
#include "reference/cache/group_managers.h"
#include "reference/types/host_pages.h"

namespace lockstep {

// The managers of groups of host pages. Source of the rules:
// vllm/v1/core/single_type_kv_cache_manager.py.
//
// Invariants
// (1) The source keeps every page of a request in the host pool, and publishes a page once the host
//     holds it. Its block ids are those of the host pool.
// (2) A resident table has one entry per page and only grows. An entry is null where the page came
//     from the host. The manager collects changes and sends them to workers as residency updates.
// (3) A hot region is allocated as a whole, by the first allocation after it was requested.

class HostPageCoordinator;

class PageSourceManager : public FullAttentionManager {
 public:
  // REQUIRES: `pool` is the host pool.
  PageSourceManager(const KVCacheSpec& spec, std::int32_t group, const EngineConfig& config,
                    BlockSizes sizes, BlockPool& pool, HostPageCoordinator& coordinator)
      : FullAttentionManager(spec, group, config, sizes, pool), coordinator_(coordinator) {}

  // Host blocks count against no device pool: none, or more than it owns.
  std::int64_t num_blocks_to_allocate(const Request& request,
                                      std::span<const BlockId> new_computed_blocks,
                                      const SlotDemand& demand) const override;
  void allocate_loaded_blocks(Request& request, std::int32_t num_computed_tokens,
                              bool zeroes) override;
  // ... as soon as they are on the host.
  void cache_blocks(Request& request, std::int32_t num_tokens) override;
  void publish(Request& request, std::int32_t num_tokens) {
    FullAttentionManager::cache_blocks(request, num_tokens);
  }
  void free(Request& request) override { pool_.free_blocks_reversed(pop(request)); }
  std::vector<BlockId> pop(Request& request) override;

  BlockPool& pool() { return pool_; }
  std::int32_t group() const { return group_; }
  std::vector<BlockId>& blocks(Request& request) const { return of(request).blocks; }
  // Of the request's first pages.
  std::vector<BlockKey> keys_of(const Request& request, std::int32_t num_pages) const;
  std::int32_t num_cached_blocks(const Request& request) const {
    return std::max(of(request).num_cached_blocks, 0);
  }

 private:
  HostPageCoordinator& coordinator_;
};

// Groups whose prefixes the source caches for them.
class PageCopyManager : public GroupManager {
 public:
  PageCopyManager(const KVCacheSpec& spec, std::int32_t group, const EngineConfig& config,
                  BlockSizes sizes, BlockPool& pool, HostPageCoordinator& coordinator)
      : GroupManager(spec, group, config, sizes, pool), coordinator_(coordinator) {}
  void take_computed_blocks(Request& request, std::span<const BlockId>, std::int32_t) override {
    of(request).num_cached_blocks = 0;
  }
  void cache_blocks(Request&, std::int32_t) override {}
  void free(Request& request) override { pool_.free_blocks_reversed(pop(request)); }
  std::int32_t find_longest_cache_hit(const HitQuery&, std::span<const std::int32_t>,
                                      std::span<std::vector<BlockId>* const> hits) const override;

 protected:
  HostPageCoordinator& coordinator_;
};

class HotPageManager : public PageCopyManager {
 public:
  using PageCopyManager::PageCopyManager;

  void require_hot(const Request& request) { required_.insert(&request); }
  bool has_hot(const Request& request) const {
    return std::ssize(of(request).blocks) == spec_.blocks_per_request;
  }
  std::int64_t num_blocks_to_allocate(const Request& request, std::span<const BlockId>,
                                      const SlotDemand& demand) const override;
  void take_local_tokens(Request& request, std::int32_t num_local_tokens) override;
  void allocate_loaded_blocks(Request& request, std::int32_t, bool) override {
    require_hot(request);
  }
  std::size_t allocate_new_blocks(Request& request, const SlotDemand& demand) override;
  std::vector<BlockId> pop(Request& request) override;

 private:
  std::set<const Request*> required_;
};

class ResidentPageManager : public PageCopyManager {
 public:
  ResidentPageManager(const KVCacheSpec& spec, std::int32_t group, const EngineConfig& config,
                      BlockSizes sizes, BlockPool& pool, HostPageCoordinator& coordinator);

  std::int64_t num_blocks_to_allocate(const Request& request, std::span<const BlockId>,
                                      const SlotDemand& demand) const override;
  void take_local_tokens(Request& request, std::int32_t num_local_tokens) override;
  // The last page is written on; those before it stay on the host.
  void allocate_loaded_blocks(Request& request, std::int32_t num_computed_tokens,
                              bool zeroes) override;
  std::vector<BlockId> pop(Request& request) override;

  std::int32_t num_pages(const Request& request) const {
    return static_cast<std::int32_t>(of(request).blocks.size());
  }
  // Where a page lies now; the null block: not on the device.
  BlockId page(const Request& request, std::int32_t index) const;
  // False: it lies somewhere already, or there is no such page.
  bool adopt(const Request& request, std::int32_t index, BlockId block);
  // The block that it was read from; the null block: none.
  BlockId drop(const Request& request, std::int32_t index);
  // Of one request: pages that admission reserves.
  std::int64_t admission_cap() const { return *admission_cap_; }
  BlockPool& pool() { return pool_; }

 private:
  std::map<const Request*, std::map<std::int32_t, BlockId>> changes_;
};

class HostPageCoordinator {
 public:
  // `device` must outlive it.
  HostPageCoordinator(const EngineConfig& config, std::unique_ptr<BlockPool> host,
                      BlockPool& device);
  virtual ~HostPageCoordinator() = default;

  BlockPool& host_pool() { return *host_; }
  const BlockPool& host_pool() const { return *host_; }
  BlockPool& device_pool() { return device_; }
  bool has_resident_pages() const { return !resident_.empty(); }

  // The managers of the engine's groups. REQUIRES: one source, and resident pages of its blocks.
  void add(PageSourceManager& source) { source_ = &source; }
  void add(ResidentPageManager& resident) { resident_.push_back(&resident); }
  void add(HotPageManager& hot);

  // Reports from the managers: the request hit `num_host_pages`; a load starts to fill its tokens;
  // this many pages may be published; the request frees its blocks.
  void commit_hit(Request& request, std::int32_t num_host_pages);
  void begin_import(const Request& request, std::int32_t num_tokens);
  void publish_when_ready(Request& request, std::int32_t num_tokens);
  void detach(Request& request);

  struct Row {
    RequestId id{};
    Request* request = nullptr;
    std::int32_t computed = 0;
    std::int32_t num_tokens = 0;
  };
  // Plans a step that has been decided, in its order.
  HostPageCommand plan_step(std::span<const Row> rows);

  // Completes a load.
  void finish_import(Request& request, bool failed);
  // Of names, each once: the order in which an engine goes through a set of them.
  using SetOrder = std::function<std::vector<std::string>(std::vector<std::string>)>;
  void take_transfers(std::span<const TransferCount> enqueued,
                      std::span<const TransferCount> completed, const SetOrder& in_set_order);
  // True if an in-flight transfer will free blocks of the device or of the host.
  bool has_pending_reclamation() const;
  bool has_pages_to_send() const { return !to_send_.empty(); }
  bool has_pending_work() const { return !to_send_.empty() || !pending_.empty(); }

 protected:
  using Page = std::pair<std::string, std::int32_t>;  // request, page
  struct Publication {
    std::int32_t num_computed_tokens = 0;
    std::int32_t num_pages = 0;
    // Of a request that has finished, and left its blocks to be published.
    bool is_detached = false;
    std::vector<BlockId> blocks{};
    std::vector<BlockKey> keys{};
    std::int32_t num_cached_blocks = 0;
  };
  struct State {
    Request* request = nullptr;
    std::set<std::int32_t> clean{};
    std::set<std::int32_t> pinned_clean{};
    std::set<std::int32_t> unpinned{};
    std::map<std::int32_t, std::int64_t> under_way{};  // page -> transfer
    std::int32_t num_ready = 0;                        // pages at the head that are clean
    std::int32_t num_recorded = 0;                     // pages whose device copies were recorded
    std::int32_t num_to_adopt = 0;
    // Workers have the pages below num_synced, except stale ones.
    std::int32_t num_synced = 0;
    std::set<std::int32_t> stale{};
    std::optional<Publication> publication{};
  };
  struct Transfer {
    Page page;
    std::shared_ptr<State> state;
    BlockId host{};
    std::vector<BlockId> resident{};
    bool restores = false;
    std::int32_t num_expected = 0;
    std::int32_t num_completed = 0;
    bool is_done() const { return num_expected > 0 && num_completed >= num_expected; }
  };
  struct CopyKey {
    BlockKey key;
    bool operator<(const CopyKey& other) const {
      return std::pair(key.high, key.low) < std::pair(other.key.high, other.key.low);
    }
  };

  std::int32_t block_size() const { return source_->block_size(); }
  std::shared_ptr<State> state_of(Request& request);
  State* find(const std::string& name) const;
  std::optional<CopyKey> key_of(BlockId host) const;
  std::vector<BlockId> device_blocks(const Request& request, std::int32_t page) const;
  virtual bool can_read_from_host(const Request& request) const;
  bool fills_admission_window(const Request& request) const;
  void require_hot(const Request& request);

  void adopt_copies(State& state);
  void record_copies(State& state, std::int32_t num_tokens);
  void record_copy(const State& state, std::int32_t page, BlockId host);
  virtual void drop_copy(const CopyKey& key);
  // True if the page is clean and no transfer of it is in flight.
  virtual bool is_clean(const State& state, std::int32_t page) const {
    return state.clean.contains(page) && !state.under_way.contains(page);
  }
  bool unpin_page(State& state, std::int32_t page);
  void page_is_clean(State& state, std::int32_t page);
  void block_is_reused(BlockId block);
  virtual void lose_page(const Page& page);
  void update_residency(State& state);
  void plan_spills(State& state, std::int32_t num_tokens);
  virtual bool plan_transfer(const std::shared_ptr<State>& state, std::int32_t page, bool restores);
  void publish(State& state);
  void publish_detached(State& state);
  void complete(Transfer& transfer, std::vector<std::string>& names);
  virtual std::vector<RowMirror> mirrors_of(Request& request, std::int32_t begin,
                                            std::int32_t end) const;
  virtual bool all_resident(std::span<const Row> rows);
  virtual ResidencyUpdate take_residency(Request& request);

  std::map<std::int64_t, Transfer> pending_;  // by number

 private:
  std::unique_ptr<BlockPool> host_;
  BlockPool& device_;
  PageSourceManager* source_ = nullptr;
  std::vector<ResidentPageManager*> resident_;
  std::vector<HotPageManager*> hot_;
  std::int32_t max_model_len_;
  std::int32_t num_reprefillable_tokens_;
  std::int32_t num_lookahead_;
  bool mirrors_placeholders_;  // drafts in flight may have been rejected, and are written again
  // Requests ask for hot regions once fewer blocks are free.
  std::int64_t transition_watermark_;

  std::map<std::string, std::shared_ptr<State>> states_;
  std::map<std::string, std::int32_t> imports_;  // tokens that a load is filling in
  std::set<std::string> all_resident_;           // requests without a null page, when last seen
  std::vector<PageTransfer> to_send_;
  std::int64_t next_id_ = 0;
  // Device copies of published host pages, for hits that come later.
  std::map<CopyKey, std::vector<BlockId>> copies_;
  std::map<BlockId, CopyKey> copy_of_;
  std::map<BlockId, std::set<Page>> readers_;  // of unpinned blocks
};

}  // namespace lockstep
