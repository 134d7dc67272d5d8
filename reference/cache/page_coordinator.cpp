#include "reference/cache/page_coordinator.h"

#include <algorithm>

#include "base/check.h"

namespace lockstep {

// The host pool is not the coordinator's, so the count cannot be part of the sum over groups: it
// either fits or refuses.
std::int64_t PageSourceManager::num_blocks_to_allocate(const Request& request,
                                                       std::span<const BlockId> new_computed_blocks,
                                                       const SlotDemand& demand) const {
  const std::int64_t required =
      FullAttentionManager::num_blocks_to_allocate(request, new_computed_blocks, demand);
  return required > pool_.num_free_blocks() ? coordinator_.device_pool().num_blocks() + 1 : 0;
}

// Records the load before its host blocks exist: plan_spills() must not copy pages that the load
// writes.
void PageSourceManager::allocate_loaded_blocks(Request& request, std::int32_t num_computed_tokens,
                                               bool zeroes) {
  coordinator_.begin_import(request, num_computed_tokens);
  FullAttentionManager::allocate_loaded_blocks(request, num_computed_tokens, zeroes);
}

void PageSourceManager::cache_blocks(Request& request, std::int32_t num_tokens) {
  coordinator_.publish_when_ready(request, num_tokens);
}

// detach() reads the table, so it comes first.
std::vector<BlockId> PageSourceManager::pop(Request& request) {
  coordinator_.detach(request);
  return FullAttentionManager::pop(request);
}

// A page's key is the hash at its end: of page p with `scale` hash blocks, number p * scale - 1
// from 1.
std::vector<BlockKey> PageSourceManager::keys_of(const Request& request,
                                                 std::int32_t num_pages) const {
  std::vector<BlockKey> keys;
  const auto scale = static_cast<std::size_t>(block_size_ / sizes_.hash_block_size);
  for (std::int32_t page = 1; page <= num_pages; ++page)
    keys.push_back(request.hashes[static_cast<std::size_t>(page) * scale - 1]);
  return keys;
}

std::int32_t PageCopyManager::find_longest_cache_hit(
    const HitQuery&, std::span<const std::int32_t>,
    std::span<std::vector<BlockId>* const> hits) const {
  for (std::vector<BlockId>* hit : hits) hit->clear();
  return 0;
}

// A request reads from the host if it imports, if it resumes from a prefix hit, or if it was
// required to. The region is allocated as a whole or not at all.
std::int64_t HotPageManager::num_blocks_to_allocate(const Request& request,
                                                    std::span<const BlockId>,
                                                    const SlotDemand& demand) const {
  const bool imports = demand.total_computed_tokens > demand.num_local_computed_tokens;
  const bool resumes = demand.num_local_computed_tokens > 0 && of(request).num_cached_blocks < 0;
  if (!imports && !resumes && !required_.contains(&request)) return 0;
  return std::max<std::int64_t>(spec_.blocks_per_request - std::ssize(of(request).blocks), 0);
}

// A hit's pages are on the host at first. Without resident pages the host is the only place.
void HotPageManager::take_local_tokens(Request& request, std::int32_t num_local_tokens) {
  if (num_local_tokens > 0 || !coordinator_.has_resident_pages()) require_hot(request);
}

std::size_t HotPageManager::allocate_new_blocks(Request& request, const SlotDemand&) {
  GroupBlocks& held = of(request);
  held.num_cached_blocks = 0;
  const std::size_t first_new = held.blocks.size();
  if (required_.contains(&request))
    grow(held.blocks, static_cast<std::size_t>(spec_.blocks_per_request));
  return first_new;
}

std::vector<BlockId> HotPageManager::pop(Request& request) {
  required_.erase(&request);
  return PageCopyManager::pop(request);
}

// Admission assumes that older pages move to the host, so a request reserves only what is in
// flight.
ResidentPageManager::ResidentPageManager(const KVCacheSpec& spec, std::int32_t group,
                                         const EngineConfig& config, BlockSizes sizes,
                                         BlockPool& pool, HostPageCoordinator& coordinator)
    : PageCopyManager(spec, group, config, sizes, pool, coordinator) {
  admission_cap_ = ceil_div(max_in_flight_tokens(config), block_size_);
}

std::int64_t ResidentPageManager::num_blocks_to_allocate(const Request& request,
                                                         std::span<const BlockId>,
                                                         const SlotDemand& demand) const {
  const std::int64_t num_held = std::ssize(of(request).blocks);
  std::int64_t required = ceil_div(demand.num_tokens, block_size_);
  if (demand.total_computed_tokens > demand.num_local_computed_tokens) {
    // An import: its last page is written on, so it needs a device block; earlier pages do not.
    const std::int32_t imported = ceil_div(demand.total_computed_tokens, block_size_);
    const bool needs_tail = page(request, imported - 1) == kNullBlock;
    return (needs_tail ? 1 : 0) +
           std::max<std::int64_t>(required - std::max<std::int64_t>(imported, num_held), 0);
  }
  if (demand.apply_admission_cap) required = std::min(required, *admission_cap_);
  // Pages of the hit are null entries: they need no device block.
  const std::int64_t on_host = ceil_div(demand.num_local_computed_tokens, block_size_);
  return std::max<std::int64_t>(required - std::max(num_held, on_host), 0);
}

void ResidentPageManager::take_local_tokens(Request& request, std::int32_t num_local_tokens) {
  const std::int32_t on_host = ceil_div(num_local_tokens, block_size_);
  of(request).blocks.assign(static_cast<std::size_t>(on_host), kNullBlock);
  coordinator_.commit_hit(request, on_host);
}

// The page in which the load ends may be full or not: the next token follows in it or after it.
void ResidentPageManager::allocate_loaded_blocks(Request& request, std::int32_t num_computed_tokens,
                                                 bool) {
  std::vector<BlockId>& blocks = of(request).blocks;
  const auto tail = static_cast<std::size_t>((num_computed_tokens - 1) / block_size_);
  if (blocks.size() <= tail) blocks.resize(tail + 1, kNullBlock);
  if (page(request, static_cast<std::int32_t>(tail)) != kNullBlock) return;
  std::vector<BlockId> given;
  pool_.get_new_blocks(1, given);
  blocks[tail] = given[0];
}

// detach() has released the clean pages. The others are dirty or in flight, and the caller frees
// them.
std::vector<BlockId> ResidentPageManager::pop(Request& request) {
  coordinator_.detach(request);
  std::vector<BlockId> blocks;
  for (std::int32_t i = 0; i < num_pages(request); ++i) blocks.push_back(page(request, i));
  changes_.erase(&request);
  of(request).clear();
  return blocks;
}

// A change overrides the table. Indices outside the table are not on the device.
BlockId ResidentPageManager::page(const Request& request, std::int32_t index) const {
  const std::vector<BlockId>& blocks = of(request).blocks;
  if (index < 0 || index >= std::ssize(blocks)) return kNullBlock;
  if (const auto changes = changes_.find(&request); changes != changes_.end())
    if (const auto change = changes->second.find(index); change != changes->second.end())
      return change->second;
  return blocks[static_cast<std::size_t>(index)];
}

bool ResidentPageManager::adopt(const Request& request, std::int32_t index, BlockId block) {
  if (index >= num_pages(request) || page(request, index) != kNullBlock) return false;
  changes_[&request][index] = block;
  return true;
}

BlockId ResidentPageManager::drop(const Request& request, std::int32_t index) {
  const BlockId block = page(request, index);
  if (block != kNullBlock) changes_[&request][index] = kNullBlock;
  return block;
}

// A tenth of the pool, or what add(HotPageManager&) raises it to.
HostPageCoordinator::HostPageCoordinator(const EngineConfig& config,
                                         std::unique_ptr<BlockPool> host, BlockPool& device)
    : host_(std::move(host)),
      device_(device),
      max_model_len_(config.max_model_len),
      num_reprefillable_tokens_(std::max(config.num_prefill_lookahead_tokens - 1, 0)),
      num_lookahead_(num_lookahead_tokens(config)),
      mirrors_placeholders_(config.async_scheduling && config.num_spec_tokens > 0),
      transition_watermark_(device.num_blocks() / 10) {
  device_.on_reuse([this](BlockId block) { block_is_reused(block); });
}

// Below the watermark requests switch to the host, which unpins their pages for others. The
// watermark is at least one request's hot regions, because the switch itself takes them.
void HostPageCoordinator::add(HotPageManager& hot) {
  hot_.push_back(&hot);
  std::int64_t cost = 0;
  for (const HotPageManager* one : hot_) cost += one->spec().blocks_per_request;
  transition_watermark_ = std::max(cost, device_.num_blocks() / 10);
}

std::shared_ptr<HostPageCoordinator::State> HostPageCoordinator::state_of(Request& request) {
  std::shared_ptr<State>& state = states_[request.name];
  if (state == nullptr) {
    state = std::make_shared<State>();
    state->request = &request;
  }
  return state;
}

HostPageCoordinator::State* HostPageCoordinator::find(const std::string& name) const {
  const auto state = states_.find(name);
  return state == states_.end() ? nullptr : state->second.get();
}

std::optional<HostPageCoordinator::CopyKey> HostPageCoordinator::key_of(BlockId host) const {
  if (host == kNullBlock || !host_->is_cached(host)) return std::nullopt;
  return CopyKey{host_->cache().key_of(host)};
}

// One block per resident group, in group order; empty if one of them has none.
std::vector<BlockId> HostPageCoordinator::device_blocks(const Request& request,
                                                        std::int32_t page) const {
  std::vector<BlockId> blocks;
  for (const ResidentPageManager* manager : resident_) {
    blocks.push_back(manager->page(request, page));
    if (blocks.back() == kNullBlock) return {};
  }
  return blocks;
}

bool HostPageCoordinator::can_read_from_host(const Request& request) const {
  return !hot_.empty() && std::ranges::all_of(hot_, [&](const HotPageManager* manager) {
    return manager->has_hot(request);
  });
}

// Admission assumes that older pages move to the host once the request holds this many. A request
// that keeps more of them pinned uses blocks that admission has counted for others.
bool HostPageCoordinator::fills_admission_window(const Request& request) const {
  return std::ranges::any_of(resident_, [&](const ResidentPageManager* manager) {
    return manager->num_pages(request) >= manager->admission_cap();
  });
}

void HostPageCoordinator::require_hot(const Request& request) {
  for (HotPageManager* manager : hot_) manager->require_hot(request);
}

// The pages of a hit are clean: other requests' transfers have put them on the host.
void HostPageCoordinator::commit_hit(Request& request, std::int32_t num_host_pages) {
  all_resident_.erase(request.name);
  const auto num_host = static_cast<std::int32_t>(source_->blocks(request).size());
  num_host_pages = std::min(num_host_pages, num_host);
  if (num_host_pages == 0) return;
  State& state = *state_of(request);
  for (std::int32_t page = 0; page < num_host_pages; ++page) state.clean.insert(page);
  state.num_ready = std::max(state.num_ready, num_host_pages);
  // Copies are adopted after the allocation that admission has counted: adopting takes free blocks
  // out of the pool.
  state.num_to_adopt = std::max(state.num_to_adopt, num_host_pages);
  state.num_recorded = std::max(state.num_recorded, num_host_pages);
}

// Reads pages of the hit from the device where a copy is still there. Each adopted block gets a
// reference, and workers receive it in a residency update.
void HostPageCoordinator::adopt_copies(State& state) {
  const std::vector<BlockId>& host = source_->blocks(*state.request);
  const auto end = std::min<std::int32_t>(std::exchange(state.num_to_adopt, 0),
                                          static_cast<std::int32_t>(host.size()));
  for (std::int32_t page = 0; page < end; ++page) {
    const auto key = key_of(host[static_cast<std::size_t>(page)]);
    const auto copy = key ? copies_.find(*key) : copies_.end();
    if (copy == copies_.end()) continue;
    for (std::size_t i = 0; i < resident_.size(); ++i) {
      const BlockId block = copy->second[i];
      if (!resident_[i]->adopt(*state.request, page, block)) continue;
      device_.touch({&block, 1});
      state.pinned_clean.insert(page);
      if (page < state.num_synced) state.stale.insert(page);
    }
  }
}

// Pages in flight are recorded when their transfer completes.
void HostPageCoordinator::record_copies(State& state, std::int32_t num_tokens) {
  const std::vector<BlockId>& host = source_->blocks(*state.request);
  const auto end = std::min(num_tokens / block_size(), static_cast<std::int32_t>(host.size()));
  for (std::int32_t page = state.num_recorded; page < end; ++page)
    if (!state.under_way.contains(page))
      record_copy(state, page, host[static_cast<std::size_t>(page)]);
  state.num_recorded = std::max(state.num_recorded, end);
}

// The newest copy replaces an older one: its blocks are evicted later.
void HostPageCoordinator::record_copy(const State& state, std::int32_t page, BlockId host) {
  const auto key = key_of(host);
  if (!key) return;
  std::vector<BlockId> blocks = device_blocks(*state.request, page);
  if (blocks.empty()) return;
  drop_copy(*key);
  for (const BlockId block : blocks) copy_of_.insert_or_assign(block, *key);
  copies_.insert_or_assign(*key, std::move(blocks));
}

void HostPageCoordinator::drop_copy(const CopyKey& key) {
  const auto copy = copies_.find(key);
  if (copy == copies_.end()) return;
  for (const BlockId block : copy->second) copy_of_.erase(block);
  copies_.erase(copy);
}

// All resident groups release the page together. readers_ remembers which request still reads each
// block.
bool HostPageCoordinator::unpin_page(State& state, std::int32_t page) {
  if (!is_clean(state, page)) return false;
  for (const ResidentPageManager* manager : resident_)
    if (page >= manager->num_pages(*state.request) - kActiveTailPages) return false;
  const std::vector<BlockId> blocks = device_blocks(*state.request, page);
  if (blocks.empty()) return false;
  for (const BlockId block : blocks) {
    readers_[block].insert({state.request->name, page});
    device_.unpin_blocks({&block, 1});
  }
  state.pinned_clean.erase(page);
  state.unpinned.insert(page);
  return true;
}

// A request without a hot region keeps its pages pinned: it cannot read the host.
void HostPageCoordinator::page_is_clean(State& state, std::int32_t page) {
  state.pinned_clean.insert(page);
  if (can_read_from_host(*state.request)) unpin_page(state, page);
}

// Several requests may read one block: a shared prefix.
void HostPageCoordinator::block_is_reused(BlockId block) {
  if (const auto copy = copy_of_.find(block); copy != copy_of_.end())
    drop_copy(CopyKey(copy->second));
  const auto readers = readers_.find(block);
  if (readers == readers_.end()) return;
  const std::set<Page> pages = std::move(readers->second);
  readers_.erase(readers);
  for (const Page& page : pages) lose_page(page);
}

// The page is lost in all groups, even if only one block was reused: transfers and reads treat
// pages as a whole. The request must read from the host from now on.
void HostPageCoordinator::lose_page(const Page& page) {
  all_resident_.erase(page.first);
  State* const state = find(page.first);
  if (state == nullptr) return;
  for (ResidentPageManager* manager : resident_) {
    const BlockId block = manager->drop(*state->request, page.second);
    if (const auto readers = readers_.find(block); readers != readers_.end())
      readers->second.erase(page);
  }
  state->unpinned.erase(page.second);
  if (page.second < state->num_synced) state->stale.insert(page.second);
  require_hot(*state->request);
}

void HostPageCoordinator::update_residency(State& state) {
  if (state.num_to_adopt > 0) adopt_copies(state);
  if (can_read_from_host(*state.request)) {
    // Tail first: a prefix loses its tail before its head. A copy of the set, because unpin_page()
    // changes it.
    const std::set<std::int32_t> pages = state.pinned_clean;
    for (auto page = pages.rbegin(); page != pages.rend(); ++page) unpin_page(state, *page);
    return;
  }
  if (device_.num_free_blocks() < transition_watermark_ || fills_admission_window(*state.request))
    require_hot(*state.request);
}

// Copies every full page that the host does not have. One step sends at most as many pages as a
// request of max_model_len has. Pages that a load is filling are skipped.
void HostPageCoordinator::plan_spills(State& state, std::int32_t num_tokens) {
  const std::int32_t end = num_tokens / block_size();
  const auto import = imports_.find(state.request->name);
  const std::int32_t imported =
      import == imports_.end() ? 0 : ceil_div(import->second, block_size());
  std::int64_t budget =
      std::max<std::int64_t>(max_model_len_ / block_size() - std::ssize(to_send_), 0);
  const std::shared_ptr<State> shared = states_.at(state.request->name);
  for (std::int32_t page = std::max(state.num_ready, imported); page < end && budget > 0; ++page) {
    if (state.under_way.contains(page) || state.clean.contains(page)) continue;
    if (plan_transfer(shared, page, false)) --budget;
  }
}

// Both sides get a reference for the time of the copy, invariant (3).
bool HostPageCoordinator::plan_transfer(const std::shared_ptr<State>& state, std::int32_t page,
                                        bool restores) {
  const std::vector<BlockId>& hosts = source_->blocks(*state->request);
  if (state->under_way.contains(page) || page >= std::ssize(hosts)) return false;
  const BlockId host = hosts[static_cast<std::size_t>(page)];
  if (host == kNullBlock) return false;
  std::vector<BlockId> blocks = device_blocks(*state->request, page);
  if (blocks.empty()) return false;
  LS_CHECK(host_->ref_cnt(host) > 0, "page {} of {}: no holder of host block {}", page,
           state->request->name, index_of(host));
  host_->touch({&host, 1});
  device_.touch(blocks);
  const std::int64_t id = next_id_++;
  to_send_.push_back({id, host, blocks, restores});
  state->under_way[page] = id;
  pending_[id] = {.page = {state->request->name, page},
                  .state = state,
                  .host = host,
                  .resident = std::move(blocks),
                  .restores = restores};
  return true;
}

// Replaces an earlier publication of the same request: the new one covers more tokens.
void HostPageCoordinator::publish_when_ready(Request& request, std::int32_t num_tokens) {
  State& state = *state_of(request);
  state.publication =
      Publication{.num_computed_tokens = num_tokens, .num_pages = num_tokens / block_size()};
  publish(state);
}

// Publishes the head of the publication that is on the host. Host copies arrive after the tokens
// that they cover, so a long prefill publishes page by page.
void HostPageCoordinator::publish(State& state) {
  if (!state.publication) return;
  const std::int32_t num_tokens =
      std::min(state.publication->num_computed_tokens, state.num_ready * block_size());
  source_->publish(*state.request, num_tokens);
  record_copies(state, num_tokens);
  if (state.num_ready >= state.publication->num_pages) state.publication.reset();
}

void HostPageCoordinator::begin_import(const Request& request, std::int32_t num_tokens) {
  all_resident_.erase(request.name);
  imports_[request.name] = num_tokens;
}

// The last page, possibly partial, is restored to the device: the request writes on in it.
void HostPageCoordinator::finish_import(Request& request, bool failed) {
  const auto import = imports_.find(request.name);
  if (import == imports_.end()) return;
  const std::int32_t num_tokens = import->second;
  imports_.erase(import);
  if (failed) return;
  const std::shared_ptr<State> state = state_of(request);
  const std::int32_t num_pages = num_tokens / block_size();
  state->clean.clear();
  for (std::int32_t page = 0; page < num_pages; ++page) state->clean.insert(page);
  state->num_ready = num_pages;
  if (num_tokens > 0) plan_transfer(state, (num_tokens - 1) / block_size(), true);
  publish(*state);
}

// Residency updates are taken last: spills and unpinning above may lose pages.
HostPageCommand HostPageCoordinator::plan_step(std::span<const Row> rows) {
  HostPageCommand command;
  command.is_told = true;
  for (const Row& row : rows) {
    // Rows that MTP modules compute again are not final, so they are not copied yet.
    State& state = *state_of(*row.request);
    const std::int32_t end = std::min(row.computed + row.num_tokens, row.request->num_tokens());
    plan_spills(state, std::max(end - num_reprefillable_tokens_, 0));
    update_residency(state);
  }
  command.transfers = std::exchange(to_send_, {});
  for (const Row& row : rows) {
    // Drafts in flight that were rejected are written again at the same positions, so their rows
    // are mirrored again.
    const std::int32_t begin =
        mirrors_placeholders_ ? std::max(row.computed - row.request->num_output_placeholders, 0)
                              : row.computed;
    command.rows.push_back(
        {row.id,
         mirrors_of(*row.request, begin, row.computed + row.num_tokens + num_lookahead_),
         {}});
  }
  command.all_resident = all_resident(rows);
  for (std::size_t i = 0; i < rows.size(); ++i)
    command.rows[i].residency = take_residency(*rows[i].request);
  command.num_free_host_blocks = host_->num_free_blocks();
  return command;
}

// One span per page. A page that has a block on one side only needs no mirror: a page on the host
// only is not written, and a page without a host block has no destination.
std::vector<RowMirror> HostPageCoordinator::mirrors_of(Request& request, std::int32_t begin,
                                                       std::int32_t end) const {
  std::vector<RowMirror> mirrors;
  const std::vector<BlockId>& hosts = source_->blocks(request);
  const std::int64_t size = block_size();
  for (std::int32_t token = begin; token < end;) {
    const std::int32_t page = token / block_size();
    const std::int32_t offset = token % block_size();
    const std::int32_t num_rows = std::min(block_size() - offset, end - token);
    token += num_rows;
    const std::vector<BlockId> blocks = device_blocks(request, page);
    if (blocks.empty() || page >= std::ssize(hosts)) continue;
    const BlockId host = hosts[static_cast<std::size_t>(page)];
    if (host == kNullBlock) continue;
    RowMirror mirror{.destination = index_of(host) * size + offset, .num_rows = num_rows};
    for (const BlockId block : blocks) mirror.sources.push_back(index_of(block) * size + offset);
    mirrors.push_back(std::move(mirror));
  }
  return mirrors;
}

// Pages become null only by a hit, an import or a reused block, each of which erases the request
// from all_resident_. So each request is scanned once: O(pages) in total.
bool HostPageCoordinator::all_resident(std::span<const Row> rows) {
  for (const Row& row : rows) {
    const std::int32_t num_pages = ceil_div(row.computed + row.num_tokens, block_size());
    if (resident_[0]->num_pages(*row.request) < num_pages) return false;
    if (all_resident_.contains(row.request->name)) continue;
    for (const ResidentPageManager* manager : resident_)
      for (std::int32_t page = 0; page < manager->num_pages(*row.request); ++page)
        if (manager->page(*row.request, page) == kNullBlock) return false;
    all_resident_.insert(row.request->name);
  }
  return true;
}

// Stale pages first, then new ones, both ascending. A request that is not scheduled keeps its
// changes for its next step.
ResidencyUpdate HostPageCoordinator::take_residency(Request& request) {
  State& state = *state_of(request);
  ResidencyUpdate update;
  const std::int32_t num_pages = resident_[0]->num_pages(request);
  if (state.stale.empty() && state.num_synced >= num_pages) return update;
  update.pages.assign(state.stale.begin(), state.stale.end());
  for (std::int32_t page = state.num_synced; page < num_pages; ++page) update.pages.push_back(page);
  for (const ResidentPageManager* manager : resident_) {
    std::vector<BlockId>& blocks = update.blocks.emplace_back();
    for (const std::int32_t page : update.pages) blocks.push_back(manager->page(request, page));
  }
  state.stale.clear();
  state.num_synced = num_pages;
  return update;
}

// Device blocks of all completed transfers are freed before any page is published, in the order of
// the transfers. The order of publication is that of a Python set (in_set_order).
void HostPageCoordinator::take_transfers(std::span<const TransferCount> enqueued,
                                         std::span<const TransferCount> completed,
                                         const SetOrder& in_set_order) {
  for (const auto& [id, count] : enqueued)
    if (const auto transfer = pending_.find(id);
        transfer != pending_.end() && transfer->second.num_expected == 0)
      transfer->second.num_expected = count;
  for (const auto& [id, count] : completed)
    if (const auto transfer = pending_.find(id); transfer != pending_.end())
      transfer->second.num_completed += count;
  std::vector<std::int64_t> done;
  for (const auto& [id, transfer] : pending_) {
    if (!transfer.is_done()) continue;
    done.push_back(id);
    for (const BlockId block : transfer.resident) device_.free_blocks({&block, 1});
  }
  std::vector<std::string> names;
  for (const std::int64_t id : done) {
    Transfer transfer = std::move(pending_.at(id));
    pending_.erase(id);
    complete(transfer, names);
  }
  for (const std::string& name : in_set_order(std::move(names))) {
    State& state = *states_.at(name);
    while (state.clean.contains(state.num_ready)) ++state.num_ready;
    publish(state);
  }
}

// Marks the page clean, or publishes for a finished request. `names` collects the requests whose
// pages have become clean, each once, in order of completion. A state that is no longer the
// request's (it was preempted) is ignored.
void HostPageCoordinator::complete(Transfer& transfer, std::vector<std::string>& names) {
  const auto& [name, page] = transfer.page;
  State& state = *transfer.state;
  state.under_way.erase(page);
  if (find(name) == &state) {
    if (!transfer.restores) state.clean.insert(page);
    if (state.clean.contains(page)) {
      page_is_clean(state, page);
      if (transfer.restores) record_copy(state, page, transfer.host);
    }
    if (std::ranges::find(names, name) == names.end()) names.push_back(name);
  } else if (state.publication) {
    if (!transfer.restores) state.clean.insert(page);
    publish_detached(state);
  }
  host_->free_blocks({&transfer.host, 1});
}

// Publishes the host pages of a finished request after its last transfer, as far as they are clean
// without a gap, and frees their host blocks, tail first.
void HostPageCoordinator::publish_detached(State& state) {
  Publication& publication = *state.publication;
  if (!state.under_way.empty() || !publication.is_detached) return;
  while (state.clean.contains(state.num_ready)) ++state.num_ready;
  const std::int32_t end = std::min(state.num_ready, publication.num_pages);
  LS_CHECK(end <= std::ssize(publication.blocks) && end <= std::ssize(publication.keys),
           "{} pages to publish, {} blocks, {} keys", end, publication.blocks.size(),
           publication.keys.size());
  for (std::int32_t page = publication.num_cached_blocks; page < end; ++page) {
    const auto i = static_cast<std::size_t>(page);
    host_->cache_block(publication.blocks[i], publication.keys[i], source_->group(),
                       (page + 1) * block_size());
  }
  host_->free_blocks_reversed(publication.blocks);
  state.publication.reset();
}

// A host block whose only reference is the transfer's is freed with it. A device block is freed if
// its request can unpin the page.
bool HostPageCoordinator::has_pending_reclamation() const {
  return std::ranges::any_of(pending_, [&](const auto& entry) {
    const Transfer& transfer = entry.second;
    if (host_->ref_cnt(transfer.host) == 1) return true;
    const State* const state = find(transfer.page.first);
    return state != nullptr && can_read_from_host(*state->request);
  });
}

// Ends the request's pages. Clean pages stay readable where they are until the pool allocates their
// blocks again, so a later hit can adopt them. Dirty pages stay in the table: pop() returns them
// and the caller frees them.
void HostPageCoordinator::detach(Request& request) {
  all_resident_.erase(request.name);
  imports_.erase(request.name);
  const auto found = states_.find(request.name);
  if (found == states_.end()) return;
  const std::shared_ptr<State> shared = std::move(found->second);
  states_.erase(found);
  State& state = *shared;
  // The last step of a preempted request may not have run, so its transfers prove nothing.
  if (request.status != RequestStatus::finished || state.under_way.empty())
    state.publication.reset();
  if (state.publication) {
    Publication& publication = *state.publication;
    const std::vector<BlockId>& hosts = source_->blocks(request);
    const auto end =
        std::min<std::size_t>(static_cast<std::size_t>(publication.num_pages), hosts.size());
    publication.is_detached = true;
    publication.blocks.assign(hosts.begin(), hosts.begin() + static_cast<std::ptrdiff_t>(end));
    publication.num_cached_blocks = source_->num_cached_blocks(request);
    publication.keys = source_->keys_of(request, publication.num_pages);
    host_->touch(publication.blocks);
  }
  for (ResidentPageManager* manager : resident_) {
    for (std::int32_t page = manager->num_pages(request) - 1; page >= 0; --page) {
      const BlockId block = manager->page(request, page);
      if (block == kNullBlock) continue;
      if (state.unpinned.contains(page)) {
        if (const auto readers = readers_.find(block); readers != readers_.end())
          readers->second.erase({request.name, page});
      } else if (is_clean(state, page)) {
        device_.unpin_blocks({&block, 1});
      } else {
        continue;
      }
      manager->drop(request, page);
    }
  }
  state.request = nullptr;  // the request may be gone when its transfer ends
}

}  // namespace lockstep
