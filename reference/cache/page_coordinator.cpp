#include "reference/cache/page_coordinator.h"

#include <algorithm>

#include "base/check.h"

namespace lockstep {

std::int64_t PageSourceManager::num_blocks_to_allocate(const Request& request,
                                                       std::span<const BlockId> new_computed_blocks,
                                                       const SlotDemand& demand) const {
  const std::int64_t required =
      FullAttentionManager::num_blocks_to_allocate(request, new_computed_blocks, demand);
  return required > pool_.num_free_blocks() ? coordinator_.device_pool().num_blocks() + 1 : 0;
}

void PageSourceManager::allocate_loaded_blocks(Request& request, std::int32_t num_computed_tokens,
                                               bool zeroes) {
  // Before its host blocks exist: plan_spills() must not copy pages that the load writes.
  coordinator_.begin_import(request, num_computed_tokens);
  FullAttentionManager::allocate_loaded_blocks(request, num_computed_tokens, zeroes);
}

void PageSourceManager::cache_blocks(Request& request, std::int32_t num_tokens) {
  coordinator_.publish_when_ready(request, num_tokens);
}

std::vector<BlockId> PageSourceManager::pop(Request& request) {
  coordinator_.detach(request);
  return FullAttentionManager::pop(request);
}

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

// A request reads from the host if it imports, resumes from a prefix hit, or was required to.
std::int64_t HotPageManager::num_blocks_to_allocate(const Request& request,
                                                    std::span<const BlockId>,
                                                    const SlotDemand& demand) const {
  const bool imports = demand.total_computed_tokens > demand.num_local_computed_tokens;
  const bool resumes = demand.num_local_computed_tokens > 0 && of(request).num_cached_blocks < 0;
  if (!imports && !resumes && !required_.contains(&request)) return 0;
  return std::max<std::int64_t>(spec_.blocks_per_request - std::ssize(of(request).blocks), 0);
}

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
    // An import: the request continues to write its last page, which needs a device block.
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

std::vector<BlockId> ResidentPageManager::pop(Request& request) {
  coordinator_.detach(request);
  std::vector<BlockId> blocks;
  for (std::int32_t i = 0; i < num_pages(request); ++i) blocks.push_back(page(request, i));
  changes_.erase(&request);
  of(request).clear();
  return blocks;
}

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

bool HostPageCoordinator::fills_admission_window(const Request& request) const {
  return std::ranges::any_of(resident_, [&](const ResidentPageManager* manager) {
    return manager->num_pages(request) >= manager->admission_cap();
  });
}

void HostPageCoordinator::require_hot(const Request& request) {
  for (HotPageManager* manager : hot_) manager->require_hot(request);
}

void HostPageCoordinator::commit_hit(Request& request, std::int32_t num_host_pages) {
  all_resident_.erase(request.name);
  const auto num_host = static_cast<std::int32_t>(source_->blocks(request).size());
  num_host_pages = std::min(num_host_pages, num_host);
  if (num_host_pages == 0) return;
  State& state = *state_of(request);
  for (std::int32_t page = 0; page < num_host_pages; ++page) state.clean.insert(page);
  state.num_ready = std::max(state.num_ready, num_host_pages);
  // Copies are adopted after the allocation that admission has counted: they leave the free queue.
  state.num_to_adopt = std::max(state.num_to_adopt, num_host_pages);
  state.num_recorded = std::max(state.num_recorded, num_host_pages);
}

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

void HostPageCoordinator::record_copies(State& state, std::int32_t num_tokens) {
  const std::vector<BlockId>& host = source_->blocks(*state.request);
  const auto end = std::min(num_tokens / block_size(), static_cast<std::int32_t>(host.size()));
  for (std::int32_t page = state.num_recorded; page < end; ++page)
    if (!state.under_way.contains(page))
      record_copy(state, page, host[static_cast<std::size_t>(page)]);
  state.num_recorded = std::max(state.num_recorded, end);
}

void HostPageCoordinator::record_copy(const State& state, std::int32_t page, BlockId host) {
  const auto key = key_of(host);
  if (!key) return;
  std::vector<BlockId> blocks = device_blocks(*state.request, page);
  if (blocks.empty()) return;
  // The newest copy replaces an older one: its blocks are evicted later.
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

void HostPageCoordinator::page_is_clean(State& state, std::int32_t page) {
  state.pinned_clean.insert(page);
  if (can_read_from_host(*state.request)) unpin_page(state, page);
}

void HostPageCoordinator::block_is_reused(BlockId block) {
  if (const auto copy = copy_of_.find(block); copy != copy_of_.end())
    drop_copy(CopyKey(copy->second));
  const auto readers = readers_.find(block);
  if (readers == readers_.end()) return;
  const std::set<Page> pages = std::move(readers->second);
  readers_.erase(readers);
  // Several requests may read one block: a shared prefix.
  for (const Page& page : pages) lose_page(page);
}

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
    // Tail first: a prefix loses its tail before its head. A copy, since unpin_page() changes it.
    const std::set<std::int32_t> pages = state.pinned_clean;
    for (auto page = pages.rbegin(); page != pages.rend(); ++page) unpin_page(state, *page);
    return;
  }
  if (device_.num_free_blocks() < transition_watermark_ || fills_admission_window(*state.request))
    require_hot(*state.request);
}

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

void HostPageCoordinator::publish_when_ready(Request& request, std::int32_t num_tokens) {
  State& state = *state_of(request);
  state.publication =
      Publication{.num_computed_tokens = num_tokens, .num_pages = num_tokens / block_size()};
  publish(state);
}

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

HostPageCommand HostPageCoordinator::plan_step(std::span<const Row> rows) {
  HostPageCommand command;
  command.is_told = true;
  for (const Row& row : rows) {
    State& state = *state_of(*row.request);
    const std::int32_t end = std::min(row.computed + row.num_tokens, row.request->num_tokens());
    // Rows that MTP modules compute again are not final, so they are not copied yet.
    plan_spills(state, std::max(end - num_reprefillable_tokens_, 0));
    update_residency(state);
  }
  command.transfers = std::exchange(to_send_, {});
  for (const Row& row : rows) {
    // Rejected drafts in flight are written again at the same positions, and mirrored again.
    const std::int32_t begin =
        mirrors_placeholders_ ? std::max(row.computed - row.request->num_output_placeholders, 0)
                              : row.computed;
    command.rows.push_back(
        {row.id,
         mirrors_of(*row.request, begin, row.computed + row.num_tokens + num_lookahead_),
         {}});
  }
  // Residency last: spills and unpinning above may lose pages.
  command.all_resident = all_resident(rows);
  for (std::size_t i = 0; i < rows.size(); ++i)
    command.rows[i].residency = take_residency(*rows[i].request);
  command.num_free_host_blocks = host_->num_free_blocks();
  return command;
}

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

ResidencyUpdate HostPageCoordinator::take_residency(Request& request) {
  State& state = *state_of(request);
  ResidencyUpdate update;
  const std::int32_t num_pages = resident_[0]->num_pages(request);
  if (state.stale.empty() && state.num_synced >= num_pages) return update;
  // Stale pages first, then new ones, both ascending.
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
  // All device blocks are freed before any page is published, in the order of the transfers.
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

void HostPageCoordinator::complete(Transfer& transfer, std::vector<std::string>& names) {
  const auto& [name, page] = transfer.page;
  State& state = *transfer.state;
  state.under_way.erase(page);
  // Not after a preemption: the name then has another state, or none.
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

bool HostPageCoordinator::has_pending_reclamation() const {
  return std::ranges::any_of(pending_, [&](const auto& entry) {
    const Transfer& transfer = entry.second;
    // Only the transfer holds the host block, which is freed with it.
    if (host_->ref_cnt(transfer.host) == 1) return true;
    const State* const state = find(transfer.page.first);
    return state != nullptr && can_read_from_host(*state->request);
  });
}

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
