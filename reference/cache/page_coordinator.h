// Pages of sparse attention between a host pool and the device. Device pages are a write-back cache
// of host pages. reference/types/host_pages.h names the source of the rules and has the messages to
// the workers.
//
// Life of a page: the step writes it on the device (dirty). Once it is full, a transfer copies it
// to the host (clean). If its request can also read from the host, the device copy is unpinned: the
// request keeps reading it until the pool allocates the block again, and reads the host afterwards.
//
// Invariants
// (1) A page is dirty (only the device has it), clean (the host copy is complete), or unpinned:
//     clean, still read on the device, and free for the pool to allocate.
// (2) Only a request with a hot region reads from the host, and only such a request unpins pages.
//     Its last kActiveTailPages stay pinned.
// (3) A page in flight holds one reference to its host block and one to each device block.
// (4) A page is published under its hash when it and all previous pages are on the host.
// (5) Workers receive a changed device block only in a residency update of a scheduled request:
//     block tables stay append-only.
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

// The host pages of each request: full attention over the host pool.
class PageSourceManager : public FullAttentionManager {
 public:
  // REQUIRES: `pool` is the host pool.
  PageSourceManager(const KVCacheSpec& spec, std::int32_t group, const EngineConfig& config,
                    BlockSizes sizes, BlockPool& pool, HostPageCoordinator& coordinator)
      : FullAttentionManager(spec, group, config, sizes, pool), coordinator_(coordinator) {}

  // Counts no device blocks: 0 if the host pool suffices, otherwise more blocks than the device
  // pool owns, which refuses the request. The host pool cannot be part of the sum over groups.
  std::int64_t num_blocks_to_allocate(const Request& request,
                                      std::span<const BlockId> new_computed_blocks,
                                      const SlotDemand& demand) const override;
  void allocate_loaded_blocks(Request& request, std::int32_t num_computed_tokens,
                              bool zeroes) override;
  // Publishes the pages as soon as they are on the host.
  void cache_blocks(Request& request, std::int32_t num_tokens) override;
  // Publishes the pages of num_tokens tokens now. REQUIRES: the host holds them.
  void publish(Request& request, std::int32_t num_tokens) {
    FullAttentionManager::cache_blocks(request, num_tokens);
  }
  void free(Request& request) override { pool_.free_blocks_reversed(pop(request)); }
  // Detaches the pages first: detach() reads the table.
  std::vector<BlockId> pop(Request& request) override;

  std::int32_t group() const { return group_; }
  std::vector<BlockId>& blocks(Request& request) const { return of(request).blocks; }
  // The keys of the request's first num_pages pages: each page's hash at its end.
  std::vector<BlockKey> keys_of(const Request& request, std::int32_t num_pages) const;
  std::int32_t num_cached_blocks(const Request& request) const {
    return std::max(of(request).num_cached_blocks, 0);
  }

 private:
  HostPageCoordinator& coordinator_;
};

// Base of the device groups: they hold copies of pages, so the source looks prefixes up for them
// and they publish nothing.
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

// Hot regions: a fixed number of blocks per request, for copies of the rows that it reads most. A
// request gets one when it has to read from the host.
class HotPageManager : public PageCopyManager {
 public:
  using PageCopyManager::PageCopyManager;

  // Requests a hot region for the next allocation; no effect if the request has one.
  void require_hot(const Request& request) { required_.insert(&request); }
  // True if the request has its whole region, so it can read from the host.
  bool has_hot(const Request& request) const {
    return std::ssize(of(request).blocks) == spec_.blocks_per_request;
  }
  // The region is allocated as a whole or not at all.
  std::int64_t num_blocks_to_allocate(const Request& request, std::span<const BlockId>,
                                      const SlotDemand& demand) const override;
  // A hit's pages are on the host at first, so a request with a hit needs a region.
  void take_local_tokens(Request& request, std::int32_t num_local_tokens) override;
  void allocate_loaded_blocks(Request& request, std::int32_t, bool) override {
    require_hot(request);
  }
  std::size_t allocate_new_blocks(Request& request, const SlotDemand& demand) override;
  std::vector<BlockId> pop(Request& request) override;

 private:
  std::set<const Request*> required_;  // requests whose next allocation gets a region
};

// Device copies of pages, one table entry per page of the request.
class ResidentPageManager : public PageCopyManager {
 public:
  ResidentPageManager(const KVCacheSpec& spec, std::int32_t group, const EngineConfig& config,
                      BlockSizes sizes, BlockPool& pool, HostPageCoordinator& coordinator);

  // Admission assumes that older pages move to the host, so it reserves only what is in flight.
  std::int64_t num_blocks_to_allocate(const Request& request, std::span<const BlockId>,
                                      const SlotDemand& demand) const override;
  void take_local_tokens(Request& request, std::int32_t num_local_tokens) override;
  // Allocates the load's last page only: the request continues to write it. Earlier pages stay on
  // the host.
  void allocate_loaded_blocks(Request& request, std::int32_t num_computed_tokens,
                              bool zeroes) override;
  // detach() has released the clean pages. The others are dirty or in flight, and the caller frees
  // them.
  std::vector<BlockId> pop(Request& request) override;

  std::int32_t num_pages(const Request& request) const {
    return static_cast<std::int32_t>(of(request).blocks.size());
  }
  // The current device block of a page; the null block: not on the device. A change overrides the
  // table.
  BlockId page(const Request& request, std::int32_t index) const;
  // Points a page at an existing copy. False: the page is on the device, or does not exist.
  bool adopt(const Request& request, std::int32_t index, BlockId block);
  // Removes a page from the device. Returns the block that held it; the null block: none did.
  BlockId drop(const Request& request, std::int32_t index);
  // Pages that admission reserves per request: those that can be in flight.
  std::int64_t admission_cap() const { return *admission_cap_; }

 private:
  // Current blocks of pages that differ from the append-only table.
  std::map<const Request*, std::map<std::int32_t, BlockId>> changes_;
};

// Decides transfers, publication and residency of the pages of all requests.
class HostPageCoordinator {
 public:
  // REQUIRES: `device` outlives the coordinator. Registers itself for reused blocks of the device
  // pool.
  HostPageCoordinator(const EngineConfig& config, std::unique_ptr<BlockPool> host,
                      BlockPool& device);
  virtual ~HostPageCoordinator() = default;

  BlockPool& host_pool() { return *host_; }
  const BlockPool& host_pool() const { return *host_; }
  BlockPool& device_pool() { return device_; }
  bool has_resident_pages() const { return !resident_.empty(); }

  // Registers the managers of the engine's groups. REQUIRES: one source, and resident pages of its
  // block size.
  void add(PageSourceManager& source) { source_ = &source; }
  void add(ResidentPageManager& resident) { resident_.push_back(&resident); }
  void add(HotPageManager& hot);

  // Reports from the managers. In order: the request hit `num_host_pages` pages of the host; a load
  // starts to fill its first num_tokens tokens; pages of num_tokens tokens may be published; the
  // request frees its blocks.
  void commit_hit(Request& request, std::int32_t num_host_pages);
  void begin_import(const Request& request, std::int32_t num_tokens);
  void publish_when_ready(Request& request, std::int32_t num_tokens);
  void detach(Request& request);

  // One scheduled request of a step.
  struct Row {
    RequestId id{};
    Request* request = nullptr;
    std::int32_t computed = 0;  // tokens before the step
    std::int32_t num_tokens = 0;
  };
  // Plans the pages of a decided step, in the step's order: spills, residency, mirrors. Called once
  // per step, after all allocations.
  HostPageCommand plan_step(std::span<const Row> rows);

  // Completes a load of host pages. Failed: nothing is published, and no page counts as clean.
  void finish_import(Request& request, bool failed);
  // Sorts names, each given once, into the order in which the engine iterates a set of them.
  using SetOrder = std::function<std::vector<std::string>(std::vector<std::string>)>;
  // Counts the workers' reports, and completes each transfer that all its workers have finished.
  void take_transfers(std::span<const TransferCount> enqueued,
                      std::span<const TransferCount> completed, const SetOrder& in_set_order);
  // True if an in-flight transfer will free blocks of the device or of the host, so that waiting is
  // better than preempting: the host block has no other reference, or the request can unpin the
  // page.
  bool has_pending_reclamation() const;
  bool has_pages_to_send() const { return !to_send_.empty(); }
  bool has_pending_work() const { return !to_send_.empty() || !pending_.empty(); }

 protected:
  using Page = std::pair<std::string, std::int32_t>;  // request name, page number
  // Pages of one request that wait for their host copies before they are published.
  struct Publication {
    std::int32_t num_computed_tokens = 0;
    std::int32_t num_pages = 0;
    // True if the request has finished: `blocks` and `keys` replace its table until its last
    // transfer has completed.
    bool is_detached = false;
    std::vector<BlockId> blocks{};
    std::vector<BlockKey> keys{};
    std::int32_t num_cached_blocks = 0;
  };
  // The pages of one request. `clean` contains the pages of the other two sets, except that a lost
  // page leaves `unpinned`.
  struct State {
    Request* request = nullptr;
    std::set<std::int32_t> clean{};         // the host copy is complete
    std::set<std::int32_t> pinned_clean{};  // clean, and the request still holds the device block
    std::set<std::int32_t> unpinned{};      // clean, and the pool may allocate the device block
    std::map<std::int32_t, std::int64_t> under_way{};  // page -> transfer
    std::int32_t num_ready = 0;                        // clean pages at the head, without a gap
    std::int32_t num_recorded = 0;                     // pages whose device copies are in copies_
    std::int32_t num_to_adopt = 0;
    // Workers have the blocks of pages below num_synced, except those of stale ones.
    std::int32_t num_synced = 0;
    std::set<std::int32_t> stale{};
    std::optional<Publication> publication{};
  };
  // A page in flight. It ends when as many workers have completed it as have submitted it.
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
    // Any total order: iteration order is never observed.
    bool operator<(const CopyKey& other) const {
      return std::pair(key.high, key.low) < std::pair(other.key.high, other.key.low);
    }
  };

  std::int32_t block_size() const { return source_->block_size(); }
  // The request's state; creates it. Shared with its transfers, which may outlive the request.
  std::shared_ptr<State> state_of(Request& request);
  // Null: the request has no pages.
  State* find(const std::string& name) const;
  // The key of a published host block; absent: not published.
  std::optional<CopyKey> key_of(BlockId host) const;
  // A page's block in each resident group; empty: some group does not have it.
  std::vector<BlockId> device_blocks(const Request& request, std::int32_t page) const;
  // True if device pages may disappear under the request: it has all its hot regions.
  virtual bool can_read_from_host(const Request& request) const;
  // True if the request holds as many pages as its admission assumed. A request that keeps more of
  // them pinned uses blocks that admission has counted for others.
  bool fills_admission_window(const Request& request) const;
  void require_hot(const Request& request);

  // Points pages of a hit at device copies that are still readable. Each adopted block gets a
  // reference, and workers receive it in a residency update.
  void adopt_copies(State& state);
  // Index the device copies of published pages, and remove an entry of the index.
  void record_copies(State& state, std::int32_t num_tokens);
  void record_copy(const State& state, std::int32_t page, BlockId host);
  virtual void drop_copy(const CopyKey& key);
  // True if the page is clean and no transfer of it is in flight.
  virtual bool is_clean(const State& state, std::int32_t page) const {
    return state.clean.contains(page) && !state.under_way.contains(page);
  }
  // Releases the device blocks of a clean page, in all resident groups together. False: it is
  // dirty, in flight, one of the last pages, or not on the device.
  bool unpin_page(State& state, std::int32_t page);
  // A request without a hot region keeps its pages pinned: it cannot read the host.
  void page_is_clean(State& state, std::int32_t page);
  // The pool allocated a block that pages are still read from: each of them is lost on the device.
  void block_is_reused(BlockId block);
  // The page is lost in all groups, even if only one block was reused: transfers and reads treat
  // pages as a whole. The request must read from the host from now on.
  virtual void lose_page(const Page& page);
  // Unpins the clean pages of a request that can read from the host. Other requests ask for a hot
  // region once free blocks run low, or once they fill their admission window.
  void update_residency(State& state);
  // Plans copies to the host of every full page that has none. One step sends at most as many pages
  // as a request of max_model_len has. Pages that a load is filling are skipped.
  void plan_spills(State& state, std::int32_t num_tokens);
  // Plans one copy of a page, in either direction. Both sides get a reference until it has
  // completed. False: the page is in flight, or has no block on one side.
  virtual bool plan_transfer(const std::shared_ptr<State>& state, std::int32_t page, bool restores);
  // Publishes the head of the request's pages that is on the host. Host copies arrive after the
  // tokens that they cover, so a long prefill publishes page by page.
  void publish(State& state);
  // The same for a finished request, after its last transfer, as far as its pages are clean without
  // a gap; then frees their host blocks, tail first.
  void publish_detached(State& state);
  // Ends a transfer: the page is clean. Appends the request's name, each once, if it has pages to
  // publish. Ignores a request that was preempted.
  void complete(Transfer& transfer, std::vector<std::string>& names);
  // Spans of the rows [begin, end) that the step also copies to the host, one per page. A page with
  // a block on one side only has none: it is not written, or has no destination.
  virtual std::vector<RowMirror> mirrors_of(Request& request, std::int32_t begin,
                                            std::int32_t end) const;
  // True if no row of the step reads from the host, so workers may skip that path. Pages become
  // null only by a hit, an import or a reused block, so each request is scanned once after those.
  virtual bool all_resident(std::span<const Row> rows);
  // Changes of the request's pages since its last update. A request that is not scheduled keeps its
  // changes for its next step.
  virtual ResidencyUpdate take_residency(Request& request);

  std::map<std::int64_t, Transfer> pending_;  // by id, in order of planning

 private:
  std::unique_ptr<BlockPool> host_;
  BlockPool& device_;
  PageSourceManager* source_ = nullptr;
  std::vector<ResidentPageManager*> resident_;
  std::vector<HotPageManager*> hot_;
  std::int32_t max_model_len_;
  std::int32_t num_reprefillable_tokens_;
  std::int32_t num_lookahead_;
  bool mirrors_placeholders_;  // rejected drafts in flight are written again
  // Free device blocks below which requests switch to the host, which unpins their pages for
  // others: a tenth of the pool, at least one request's hot regions, because the switch itself
  // takes them.
  std::int64_t transition_watermark_;

  std::map<std::string, std::shared_ptr<State>> states_;
  std::map<std::string, std::int32_t> imports_;  // tokens that a load is filling
  std::set<std::string> all_resident_;           // requests without a null page when last scanned
  std::vector<PageTransfer> to_send_;
  std::int64_t next_id_ = 0;
  // Device copies of published host pages, one block per resident group, for later hits; and the
  // key by block.
  std::map<CopyKey, std::vector<BlockId>> copies_;
  std::map<BlockId, CopyKey> copy_of_;
  std::map<BlockId, std::set<Page>> readers_;  // of unpinned blocks
};

}  // namespace lockstep
