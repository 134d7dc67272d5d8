#include "reference/cache/kv_cache_coordinator.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/check.h"

namespace lockstep {
namespace {

// True if caches on the device differ in dtype or quantization. A recycled block then holds bytes
// of another format, which may read as NaN.
bool has_several_dtypes(std::span<const KVCacheGroupSpec> groups) {
  std::vector<std::pair<DType, KVQuantMode>> precisions;
  for (const KVCacheGroupSpec& group : groups) {
    if (belongs_to_pages(group)) continue;
    for (std::size_t layer = 0; layer < std::max<std::size_t>(group.layer_specs.size(), 1);
         ++layer) {
      const KVCacheSpec& spec = group.layer_spec(layer);
      if (!is_state_kind(spec.kind)) precisions.emplace_back(spec.dtype, spec.kv_quant_mode);
    }
  }
  return std::ranges::adjacent_find(precisions, std::not_equal_to{}) != precisions.end();
}

// True if the worker must zero new blocks of the group. All conditions are the engine's: only
// models with states, or with several dtypes in later releases, and only the kinds that the release
// zeroes. States and rings are never zeroed.
bool zeroes(const EngineProfile& profile, std::span<const KVCacheGroupSpec> groups,
            const KVCacheGroupSpec& group) {
  const CacheKind kind = group.spec.kind;
  if (belongs_to_pages(group)) return false;
  const bool has_mamba = std::ranges::any_of(
      groups, [](const KVCacheGroupSpec& g) { return is_state_kind(g.spec.kind); });
  if (!has_mamba && !(profile.zeroes_mixed_dtypes && has_several_dtypes(groups))) return false;
  switch (profile.zeroed_blocks) {
    case ZeroedBlocks::full_attention:
      return is_full_of_pairs(kind);
    case ZeroedBlocks::full_and_latent_attention:
      return attends_to_all(kind);
    case ZeroedBlocks::every_full_attention:
      return is_full_attention(kind);
    case ZeroedBlocks::attention:
      break;
  }
  return !is_state_kind(kind) && !is_ring(kind);
}

}  // namespace

std::unique_ptr<BlockPool> CacheParts::pool(std::int64_t num_blocks, bool enable_caching,
                                            FreedBlocks freed_blocks) const {
  return std::make_unique<BlockPool>(num_blocks, enable_caching, freed_blocks);
}

std::unique_ptr<GroupManager> CacheParts::manager(const KVCacheSpec& spec, std::int32_t group,
                                                  const EngineConfig& config, BlockSizes sizes,
                                                  BlockPool& pool) const {
  return GroupManager::create(spec, group, config, sizes, pool);
}

std::unique_ptr<HostPageCoordinator> CacheParts::host_pages(const EngineConfig& config,
                                                            std::unique_ptr<BlockPool> host,
                                                            BlockPool& device) const {
  return std::make_unique<HostPageCoordinator>(config, std::move(host), device);
}

std::unique_ptr<KVCacheCoordinator> CacheParts::coordinator(
    const EngineConfig& config, std::span<const KVCacheGroupSpec> groups, BlockSizes sizes,
    std::int64_t num_blocks) const {
  return std::make_unique<KVCacheCoordinator>(config, groups, sizes, num_blocks, *this);
}

// Null entries count: a table of null blocks still has a length.
bool PrefixHit::any_blocks() const {
  return std::ranges::any_of(blocks, [](const auto& table) { return !table.empty(); });
}

void PrefixHit::clear(std::size_t num_groups) {
  blocks.resize(num_groups);
  for (auto& table : blocks) table.clear();
  num_tokens = 0;
  num_replayed_tokens = 0;
  num_external_tokens = 0;
  loads_async = false;
  num_blocks_left_free = 0;
  shared_prefix_boundary = 0;
}

// Groups of equal specs form one AttentionGroup, except the page source: its blocks are of another
// pool.
KVCacheCoordinator::KVCacheCoordinator(const EngineConfig& config,
                                       std::span<const KVCacheGroupSpec> groups,
                                       BlockSizes block_sizes, std::int64_t num_blocks,
                                       const CacheParts& parts)
    : config_(config), profile_(engine_profile(config.engine)), block_sizes_(block_sizes) {
  pool_ = parts.pool(num_blocks, config.enable_prefix_caching, profile_.freed_blocks);
  if (config.enable_prefix_caching && config.hash_algorithm != HashAlgorithm::content)
    pool_->keep_events();
  num_reprefillable_tokens_ = std::max(config.num_prefill_lookahead_tokens - 1, 0);
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const auto group = static_cast<std::int32_t>(g);
    managers_.push_back(make_manager(groups[g], group, parts));
    has_states_ |= is_state_kind(groups[g].spec.kind);
    if (zeroes(profile_, groups, groups[g])) managers_.back()->record_new_blocks();
    if (groups[g].spec.bounded_replay)
      prefix_replay_tokens_ = static_cast<std::int32_t>(groups[g].spec.sliding_window);
    if (groups.size() > 1 && !is_prefix_cacheable(groups[g].spec)) continue;
    const auto same = std::ranges::find_if(attention_groups_, [&](const AttentionGroup& a) {
      return groups[a.groups[0]].spec == groups[g].spec && !is_source(a.groups[0]);
    });
    if (same != attention_groups_.end())
      same->groups.push_back(group);
    else
      attention_groups_.push_back(
          {{group},
           is_full_attention(groups[g].spec.kind),
           !is_state_kind(groups[g].spec.kind) || !profile_.searches_states_within_hit});
  }
  // Full attention first: its search from the left gives the tightest bound for the others. The
  // stable order keeps the engine's tie-breaks.
  std::stable_partition(attention_groups_.begin(), attention_groups_.end(),
                        [](const AttentionGroup& a) { return a.is_full; });
  // EAGLE without lookahead hashes drops a block of each hit.
  if (hit_end_of(config, profile_).drops_last_block) split_eagle_groups(groups);
}

// The page source comes before its copies (check_host_pages() in scheduler.cpp), so host_pages_
// exists when they are created. Its pool is the host's.
std::unique_ptr<GroupManager> KVCacheCoordinator::make_manager(const KVCacheGroupSpec& group,
                                                               std::int32_t number,
                                                               const CacheParts& parts) {
  const auto made = [&]<class Manager>(std::unique_ptr<Manager> manager) {
    host_pages_->add(*manager);
    return manager;
  };
  const KVCacheSpec& spec = group.spec;
  if (group.role == kPageSourceRole) {
    source_group_ = number;
    host_pages_ = parts.host_pages(config_,
                                   parts.pool(config_.host_pool_num_blocks,
                                              config_.enable_prefix_caching, profile_.freed_blocks),
                                   *pool_);
    return made(std::make_unique<PageSourceManager>(spec, number, config_, block_sizes_,
                                                    host_pages_->host_pool(), *host_pages_));
  }
  if (is_resident_pages(spec.kind))
    return made(std::make_unique<ResidentPageManager>(spec, number, config_, block_sizes_, *pool_,
                                                      *host_pages_));
  if (is_hot_pages(spec.kind))
    return made(std::make_unique<HotPageManager>(spec, number, config_, block_sizes_, *pool_,
                                                 *host_pages_));
  return parts.manager(spec, number, config_, block_sizes_, *pool_);
}

// EAGLE drops a block of hits in groups that have draft layers, and in those looked up with them;
// if no group is marked, in all groups, as vLLM falls back (KVCacheCoordinator.__init__()).
void KVCacheCoordinator::split_eagle_groups(std::span<const KVCacheGroupSpec> groups) {
  const bool any_marked = std::ranges::any_of(groups, &KVCacheGroupSpec::is_eagle_group);
  for (AttentionGroup& attention : attention_groups_) {
    attention.drops_last_block =
        !any_marked || std::ranges::any_of(attention.groups, [&](std::int32_t group) {
          return groups[static_cast<std::size_t>(group)].is_eagle_group;
        });
    if (attention.drops_last_block) continue;
    for (const std::int32_t group : attention.groups) managers_[group]->keep_last_block();
  }
}

void KVCacheCoordinator::find_longest_cache_hit(const Request& request, PrefixHit& hit) const {
  hit.clear(managers_.size());
  if (!config_.enable_prefix_caching || request.skips_prefix_cache) return;
  const std::int32_t max_length = max_hit_tokens(request);
  if (managers_.size() > 1) {
    find_hybrid(request, max_length, hit);
    if (prefix_replay_tokens_ > 0) replay_window(hit);
    return;
  }
  const std::int32_t group = 0;
  std::vector<BlockId>* table = &hit.blocks[0];
  hit.num_tokens = managers_[0]->find_longest_cache_hit(
      {request.hashes, max_length, managers_[0]->drops_last_block()}, {&group, 1}, {&table, 1});
}

// Bounded replay computes the last prefix_replay_tokens_ tokens of a hit again, since their window
// is not cached. A hit that is not longer than the window is dropped: it would save nothing.
void KVCacheCoordinator::replay_window(PrefixHit& hit) const {
  if (hit.num_tokens > prefix_replay_tokens_) {
    LS_CHECK(hit.num_replayed_tokens == 0, "{} tokens of a hit are replayed already",
             hit.num_replayed_tokens);
    hit.num_replayed_tokens = prefix_replay_tokens_;
    return;
  }
  for (auto& table : hit.blocks) table.clear();
  hit.num_tokens = 0;
}

// The unit that EAGLE drops is a hash where parts of blocks are hit, otherwise a block.
std::int32_t KVCacheCoordinator::end_of_drop(const AttentionGroup& attention, std::int32_t length,
                                             std::int32_t end) const {
  if (!attention.grows) return length;
  const std::int32_t unit = block_sizes_.hits_parts_of_blocks && attention.is_full
                                ? block_sizes_.hash_block_size
                                : managers_[attention.groups[0]]->block_size();
  return std::min(length + unit, end);
}

// Finds the longest length that every group accepts, by iteration: each group accepts the candidate
// or shortens it, until none does. The length only decreases, so this ends. Full attention is
// searched once, since every prefix of its hit is also a hit; later rounds only cut it.
//
// EAGLE drops a block once per candidate length: a group that drops searches one block (or hash)
// further, so that the drop leads back to the candidate. If the length shrinks, the drops are due
// again.
void KVCacheCoordinator::find_hybrid(const Request& request, std::int32_t max_length,
                                     PrefixHit& hit) const {
  // With full attention and one other group the second search is already within the first one's
  // hit, so one round is enough.
  const bool one_pass = attention_groups_.size() == 2 && attention_groups_[0].is_full;
  std::vector<bool> looked_up(attention_groups_.size(), false);
  std::vector<bool> dropped(attention_groups_.size(),
                            false);  // EAGLE's drop, once per candidate length
  std::vector<std::vector<BlockId>*> tables;
  std::vector<std::int32_t> lengths(attention_groups_.size(), 0);
  std::int32_t length = max_length;
  std::int32_t longest = 0;
  const std::int32_t end_of_search =
      profile_.eagle_searches_whole_prompt ? num_hashed_tokens(request) : max_length;
  while (true) {
    std::int32_t current = length;
    for (std::size_t a = 0; a < attention_groups_.size(); ++a) {
      const AttentionGroup& attention = attention_groups_[a];
      const GroupManager& manager = *managers_[attention.groups[0]];
      const std::int32_t block_size = manager.block_size();
      if (attention.is_full && looked_up[a]) {
        current = block_sizes_.hits_parts_of_blocks ? std::min(current, lengths[a])
                                                    : current / block_size * block_size;
        continue;
      }
      const bool drop = attention.drops_last_block && !dropped[a];
      const std::int32_t limit = drop ? end_of_drop(attention, current, end_of_search) : current;
      tables.clear();
      for (const std::int32_t group : attention.groups) tables.push_back(&hit.blocks[group]);
      const std::int32_t found =
          manager.find_longest_cache_hit({request.hashes, limit, drop}, attention.groups, tables);
      looked_up[a] = true;
      lengths[a] = found;
      if (drop)
        dropped[a] = true;
      else if (found < current)
        dropped.assign(dropped.size(), false);
      current = found;
      longest = std::max(longest, found);
    }
    if (current >= length) break;
    length = current;
    if (one_pass) break;
  }
  hit.num_tokens = length;
  LS_CHECK(length >= 0 && length <= max_length, "a hit of {} tokens, at most {}", length,
           max_length);
  if (longest > length) hit.shared_prefix_boundary = longest;
  cut_full_groups(hit);
}

// Cuts full attention to the common length: it was searched before the other groups shortened it.
// The others were searched within the length. Early releases cut only the groups of the first spec
// (finding 2).
void KVCacheCoordinator::cut_full_groups(PrefixHit& hit) const {
  for (const AttentionGroup& attention : attention_groups_) {
    if (!attention.is_full) break;  // full attention comes first
    for (const std::int32_t group : attention.groups) {
      if (is_source(group)) continue;  // it keeps what the device has lost
      const std::int32_t block_size = managers_[group]->block_size();
      std::vector<BlockId>& table = hit.blocks[group];
      table.resize(
          std::min(table.size(), static_cast<std::size_t>(ceil_div(hit.num_tokens, block_size))));
    }
    if (!profile_.cuts_every_full_group) break;
  }
}

std::optional<bool> KVCacheCoordinator::find_hit_of_attention(const Request& request,
                                                              PrefixHit& hit) const {
  const bool is_hybrid = has_states_ && managers_.size() > 1 && config_.enable_prefix_caching;
  if (!is_hybrid || request.skips_prefix_cache || !attention_groups_[0].is_full)
    return std::nullopt;
  hit.clear(managers_.size());
  const std::int32_t max_length = request.num_tokens() - 1;
  std::vector<std::vector<BlockId>*> tables;
  std::int32_t shortest = max_length;
  for (const AttentionGroup& attention : attention_groups_) {
    const GroupManager& manager = *managers_[attention.groups[0]];
    const std::int32_t limit = attention.drops_last_block
                                   ? end_of_drop(attention, max_length, num_hashed_tokens(request))
                                   : max_length;
    tables.clear();
    for (const std::int32_t group : attention.groups) tables.push_back(&hit.blocks[group]);
    const std::int32_t found = manager.find_longest_cache_hit(
        {request.hashes, limit, attention.drops_last_block}, attention.groups, tables);
    if (&attention == &attention_groups_[0]) hit.num_tokens = found;
    if (found > hit.num_tokens) return std::nullopt;
    shortest = std::min(shortest, found);
  }
  return shortest < hit.num_tokens;
}

void KVCacheCoordinator::cut_source(PrefixHit& hit) const {
  if (host_pages_ == nullptr) return;
  std::vector<BlockId>& table = hit.blocks[source_group_];
  const std::int32_t num_blocks =
      ceil_div(hit.num_tokens + hit.num_external_tokens, managers_[source_group_]->block_size());
  table.resize(std::min(table.size(), static_cast<std::size_t>(num_blocks)));
}

void KVCacheCoordinator::cut_hit(PrefixHit& hit, std::int32_t num_tokens) const {
  for (std::size_t g = 0; g < managers_.size(); ++g) {
    if (!is_prefix_cacheable(managers_[g]->spec())) continue;
    const auto num_blocks = static_cast<std::size_t>(num_tokens / managers_[g]->block_size());
    LS_CHECK(is_state_kind(managers_[g]->spec().kind) || num_blocks <= hit.blocks[g].size(),
             "group {}: {} blocks of a hit, cut to {}", g, hit.blocks[g].size(), num_blocks);
    hit.blocks[g].resize(std::min(num_blocks, hit.blocks[g].size()));
  }
  LS_CHECK(num_tokens >= 0 && num_tokens <= hit.num_tokens, "a hit of {} tokens is cut to {}",
           hit.num_tokens, num_tokens);
  hit.num_tokens = num_tokens;
}

// The sum over all groups. Groups that cannot run in this step return more than the pool owns,
// which makes the sum unattainable.
std::int64_t KVCacheCoordinator::num_blocks_to_allocate(const Request& request,
                                                        const PrefixHit* hit,
                                                        const SlotDemand& demand) const {
  std::int64_t total = 0;
  for (std::size_t g = 0; g < managers_.size(); ++g) {
    const std::span<const BlockId> hits =
        hit == nullptr ? std::span<const BlockId>{} : std::span<const BlockId>{hit->blocks[g]};
    total += managers_[g]->num_blocks_to_allocate(request, hits, demand);
  }
  return total;
}

// The order follows vLLM 0.33.0, KVCacheManager.allocate_slots(): admit the whole request, free
// what attention no longer reads, count, take the hit, allocate, publish. Each step may change what
// the next one finds in the pool.
bool KVCacheCoordinator::allocate_slots(Request& request, std::int32_t num_new_tokens,
                                        std::int32_t num_lookahead_tokens, const PrefixHit* hit,
                                        bool full_sequence_must_fit,
                                        std::span<std::size_t> first_new) {
  const std::int32_t num_external = hit == nullptr ? 0 : hit->num_external_tokens;
  LS_CHECK(num_new_tokens > 0 || num_external > 0 || (hit != nullptr && hit->num_tokens > 0),
           "request {} is given {} tokens", request.name, num_new_tokens);
  const std::int32_t computed =
      request.num_computed_tokens + (hit == nullptr ? 0 : hit->num_tokens) + num_external;
  LS_CHECK(first_new.size() == managers_.size(), "{} places for {} groups", first_new.size(),
           managers_.size());
  const std::int32_t total_computed = std::min(computed, config_.max_model_len);
  if (full_sequence_must_fit &&
      !pool_->can_give(num_blocks_to_finish(request, hit, 0, hit != nullptr)))
    return false;
  const std::int32_t main_model = total_computed + num_new_tokens;
  const SlotDemand demand{std::min(main_model + num_lookahead_tokens, config_.max_model_len),
                          main_model,
                          hit == nullptr ? computed : num_not_computed(request, computed),
                          false,
                          computed - num_external,
                          prefill_end(request)};
  // Frees the blocks even if the request is then refused: attention no longer reads them.
  const std::int32_t left_behind = num_left_behind(request, total_computed);
  remove_skipped_blocks(request, left_behind);
  if (has_states_)
    for (const auto& manager : managers_) manager->prepare_allocation(request, demand);
  const std::int64_t num_blocks = num_blocks_to_allocate(request, hit, demand);
  if (!pool_->can_give(num_blocks + (hit == nullptr ? 0 : hit->num_blocks_left_free))) return false;
  if (num_external > 0 && has_states_ && !has_room_behind_load(request, demand, num_blocks))
    return false;
  if (hit != nullptr && (hit->fills_tables() || host_pages_ != nullptr))
    take_hit(request, *hit, demand);
  for (std::size_t g = 0; g < managers_.size(); ++g)
    first_new[g] = managers_[g]->allocate_new_blocks(request, demand);
  if (hit != nullptr && hit->loads_async) return true;
  // Publishes accepted tokens only: drafts may be rejected, so the count stops at num_tokens().
  const bool waits = num_external > 0 && profile_.publishes_loads_late;
  if (config_.enable_prefix_caching && !waits)
    cache_blocks(request, std::min(main_model, request.num_tokens()));
  note_rest(request, left_behind);
  return true;
}

// A state group counts one block for a step that takes two: the loaded state, and the state that
// the step ends with. vLLM stops if the pool has only one of them; the model refuses the request
// instead.
bool KVCacheCoordinator::has_room_behind_load(const Request& request, const SlotDemand& demand,
                                              std::int64_t num_blocks) {
  for (const auto& manager : managers_) {
    if (!is_state_kind(manager->spec().kind) || !request.groups[0].blocks.empty()) continue;
    const bool goes_on = ceil_div(demand.num_tokens_main_model, manager->block_size()) >
                         ceil_div(demand.total_computed_tokens, manager->block_size());
    if (goes_on) ++num_blocks;
  }
  return pool_->can_give(num_blocks);
}

// Takes the hits of all groups before any block is allocated for a load, in releases that do so:
// otherwise an earlier group's load can evict a later group's hit (finding 12).
void KVCacheCoordinator::take_hit(Request& request, const PrefixHit& hit,
                                  const SlotDemand& demand) {
  if (host_pages_ != nullptr && request.groups[source_group_].num_cached_blocks >= 0) return;
  for (std::size_t g = 0; g < managers_.size(); ++g) take_hit_of_group(g, request, hit, demand);
  if (hit.num_external_tokens > 0 && profile_.takes_hits_of_all_groups_first)
    for (const auto& manager : managers_) allocate_load(request, hit, *manager);
}

void KVCacheCoordinator::take_hit_of_group(std::size_t group, Request& request,
                                           const PrefixHit& hit, const SlotDemand&) {
  GroupManager& manager = *managers_[group];
  const std::vector<BlockId>& blocks = hit.blocks[group];
  const std::int32_t computed = hit.num_tokens + hit.num_external_tokens;
  manager.take_computed_blocks(request, blocks, num_not_computed(request, computed));
  manager.take_local_tokens(request, hit.num_tokens);
  if (block_sizes_.hits_parts_of_blocks && !blocks.empty() &&
      hit.num_tokens % manager.block_size() != 0)
    manager.share_part(request, hit.num_tokens);
  // Older releases allocate here, before the next group has taken its hit, which this may evict.
  if (hit.num_external_tokens > 0 && !profile_.takes_hits_of_all_groups_first)
    allocate_load(request, hit, manager);
}

// Zeroing would race with an asynchronous load that writes the same blocks, so later releases skip
// it.
void KVCacheCoordinator::allocate_load(Request& request, const PrefixHit& hit,
                                       GroupManager& manager) const {
  const bool is_written = hit.loads_async && is_prefix_cacheable(manager.spec());
  manager.allocate_loaded_blocks(request, hit.num_tokens + hit.num_external_tokens,
                                 profile_.zeroes_loads || !is_written);
}

// Repair of finding 13: the last token of a fully loaded prompt is computed here, so its window
// must stay.
std::int32_t KVCacheCoordinator::num_not_computed(const Request& request,
                                                  std::int32_t num_computed_tokens) const {
  return profile_.keeps_window_of_last_token
             ? std::min(num_computed_tokens, request.num_tokens() - 1)
             : num_computed_tokens;
}

std::int64_t KVCacheCoordinator::num_blocks_to_finish(const Request& request, const PrefixHit* hit,
                                                      std::int32_t num_slots_behind,
                                                      bool is_capped) const {
  const std::int32_t full = std::min(request.num_tokens(), config_.max_model_len);
  std::int32_t computed = request.num_computed_tokens;
  if (hit != nullptr) computed += hit->num_tokens + hit->num_external_tokens;
  computed = num_not_computed(request, std::min(computed, config_.max_model_len));
  const std::int32_t local = request.num_computed_tokens + (hit == nullptr ? 0 : hit->num_tokens);
  return num_blocks_to_allocate(
      request, hit,
      {full + num_slots_behind, full, computed, is_capped, local, prefill_end(request)});
}

std::int64_t KVCacheCoordinator::num_attention_blocks(std::int32_t num_tokens) const {
  std::int64_t num_blocks = 0;
  for (const auto& manager : managers_)
    if (!is_state_kind(manager->spec().kind))
      num_blocks += ceil_div(num_tokens, manager->block_size());
  return num_blocks;
}

// Where sparse retention keeps only the state that a prefill ends with, only the chunk that ends
// there exports one. A resumed request replays its output, all except the last token.
std::int32_t KVCacheCoordinator::prefill_end(const Request& request) const {
  return config_.prefix_cache_retention_interval == 0
             ? std::max(request.num_prompt_tokens(), request.num_tokens() - 1)
             : 0;
}

// In-flight steps may still read the window of their own position, and rejected drafts move it
// back.
std::int32_t KVCacheCoordinator::num_left_behind(const Request& request,
                                                 std::int32_t num_computed_tokens) const {
  if (profile_.retire_basis == RetireBasis::processed)
    return std::max(0, num_computed_tokens - request.num_in_flight_tokens);
  return num_computed_tokens;
}

void KVCacheCoordinator::note_rest(Request& request, std::int32_t num_left_behind) const {
  if (has_states_ || host_pages_ != nullptr) return;
  constexpr std::int32_t kNever = std::numeric_limits<std::int32_t>::max();
  request.rest = {kNever, kNever, kNever};
  for (const auto& manager : managers_) manager->narrow(request, num_left_behind, request.rest);
  if (!config_.enable_prefix_caching) request.rest.publishes_at = kNever;
}

// The three comparisons mirror allocate_slots(): slots, retirement, publication. A rest of all
// zeros fails the first.
bool KVCacheCoordinator::is_at_rest(const Request& request, std::int32_t num_new_tokens,
                                    std::int32_t num_lookahead_tokens) const {
  const TableRest& rest = request.rest;
  const std::int32_t computed = std::min(request.num_computed_tokens, config_.max_model_len);
  const std::int32_t end = computed + num_new_tokens;
  return std::min(end + num_lookahead_tokens, config_.max_model_len) <= rest.num_tokens &&
         num_left_behind(request, computed) < rest.retires_at &&
         std::min(end, request.num_tokens()) < rest.publishes_at;
}

void KVCacheCoordinator::cache_blocks(Request& request, std::int32_t num_computed_tokens) {
  if (!config_.enable_prefix_caching || num_computed_tokens < request.rest.publishes_at) return;
  for (const auto& manager : managers_)
    manager->cache_blocks(request, num_cacheable_tokens(num_computed_tokens, *manager));
}

std::int32_t KVCacheCoordinator::num_cacheable_tokens(std::int32_t num_computed_tokens,
                                                      const GroupManager& manager) const {
  // One group: rows that MTP modules compute again are not final and stay unpublished.
  if (managers_.size() == 1) return std::max(num_computed_tokens - num_reprefillable_tokens_, 0);
  if (block_sizes_.hits_parts_of_blocks || !profile_.publishes_reachable_blocks_only)
    return num_computed_tokens;
  // Hits end at multiples of the common block size, so no lookup hits past the last one, except for
  // the block that EAGLE drops.
  const std::int32_t alignment = block_sizes_.scheduler_block_size;
  const std::int32_t aligned = num_computed_tokens / alignment * alignment;
  if (!manager.drops_last_block() || !profile_.publishes_dropped_blocks || aligned == 0)
    return aligned;
  return std::min(num_computed_tokens, aligned + manager.block_size());
}

void KVCacheCoordinator::remove_skipped_blocks(Request& request, std::int32_t num_computed_tokens) {
  for (const auto& manager : managers_)
    manager->remove_skipped_blocks(request, num_computed_tokens);
}

void KVCacheCoordinator::free(Request& request) {
  for (const auto& manager : managers_) manager->free(request);
  LS_CHECK(std::ranges::all_of(request.groups,
                               [](const GroupBlocks& group) { return group.blocks.empty(); }),
           "{} holds blocks after they were freed", request.name);
  request.rest = {};
}

TakenBlocks KVCacheCoordinator::take_table(Request& request) {
  TakenBlocks taken;
  for (std::int32_t g = 0; g < num_groups(); ++g) {
    std::vector<BlockId>& blocks = is_source(g) ? taken.host : taken.device;
    for (const BlockId block : managers_[g]->pop(request))
      if (block != kNullBlock) blocks.push_back(block);
  }
  request.rest = {};
  return taken;
}

bool KVCacheCoordinator::reset_prefix_cache() {
  const bool is_reset = pool_->reset_prefix_cache();
  if (host_pages_ == nullptr) return is_reset;
  return host_pages_->host_pool().reset_prefix_cache() && is_reset;
}

void KVCacheCoordinator::record_again(const Request& request, std::int32_t first_token) {
  for (const auto& manager : managers_) manager->record_again(request, first_token);
}

bool KVCacheCoordinator::lacks_window(const Request& request,
                                      std::int32_t num_computed_tokens) const {
  return std::ranges::any_of(managers_, [&](const auto& manager) {
    return manager->lacks_window(request, num_computed_tokens);
  });
}

void KVCacheCoordinator::withdraw(const Request& request, std::int32_t num_computed_tokens) {
  for (std::size_t g = 0; g < managers_.size(); ++g) {
    const std::vector<BlockId>& blocks = request.groups[g].blocks;
    const auto first = static_cast<std::size_t>(num_computed_tokens / managers_[g]->block_size());
    BlockPool& pool = is_source(static_cast<std::int32_t>(g)) ? host_pages_->host_pool() : *pool_;
    for (std::size_t i = first; i < blocks.size(); ++i)
      if (blocks[i] != kNullBlock) pool.evict_blocks({&blocks[i], 1});
  }
}

void KVCacheCoordinator::num_common_prefix_blocks(const Request& request, std::int32_t num_requests,
                                                  std::vector<std::int32_t>& out) const {
  out.assign(managers_.size(), 0);
  if (!config_.enable_prefix_caching) return;
  for (std::size_t g = 0; g < managers_.size(); ++g)
    out[g] = managers_[g]->num_common_prefix_blocks(request, num_requests);
}

void KVCacheCoordinator::take_copies(std::vector<KVCacheBlockCopy>& out,
                                     std::vector<BlockId>& held) {
  if (!block_sizes_.hits_parts_of_blocks && !(has_states_ && profile_.hits_parts_of_blocks)) return;
  for (const auto& manager : managers_) manager->take_copies(out);
  for (const KVCacheBlockCopy& copy : out) held.insert(held.end(), {copy.from, copy.to});
}

void KVCacheCoordinator::take_new_block_ids(std::vector<BlockId>& out) {
  for (const auto& manager : managers_) manager->take_new_block_ids(out);
}

}  // namespace lockstep
