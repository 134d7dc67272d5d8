#include "reference/plan/block_sizes.h"

#include <fmt/core.h>

#include <algorithm>
#include <numeric>

#include "reference/plan/page_size.h"
#include "reference/plan/rank_plan.h"
#include "reference/profiles/engine_profile.h"
#include "reference/types/token_rows.h"

namespace lockstep {
namespace {

Result<BlockSizes> single_group_sizes(const EngineConfig& config, const EngineProfile& profile,
                                      const KVCacheSpec& spec) {
  const std::int32_t num_ranks = num_context_ranks(config, spec);
  const auto own = static_cast<std::int32_t>(spec.block_size) * num_ranks;
  // An engine core takes the group's block size before it makes a scheduler; with prefix caching
  // the configuration must say it.
  if (!config.enable_prefix_caching && profile.group_blocks_divide_scheduler_block)
    return BlockSizes{own, own};
  const std::int32_t size = config.block_size * num_ranks;
  if (config.enable_prefix_caching && own != size)
    return fail(
        "block_size: the group has blocks of {} tokens and the configuration of {}; with prefix "
        "caching they must be equal",
        own, size);
  if (config.enable_prefix_caching && config.prefix_match_unit != 0 &&
      config.prefix_match_unit != size)
    return fail("prefix_match_unit: {}; of a single group expected its block size {}",
                config.prefix_match_unit, size);
  return BlockSizes{size, size};
}

// What the block size of a group spans when decode context parallelism divides it.
std::int64_t num_tokens_in_block(const EngineConfig& config, const KVCacheSpec& spec) {
  return is_dealt_out(spec) ? spec.block_size * config.dcp : spec.block_size;
}

bool can_hit_parts(const EngineConfig& config, const KVCacheSpec& spec,
                   std::int32_t hash_block_size) {
  const bool looks_up_whole_blocks = is_prefix_cacheable(spec) && is_windowed(spec.kind);
  return !looks_up_whole_blocks || num_tokens_in_block(config, spec) == hash_block_size;
}

// Whether a hit may end inside a block (partial_hash_hits_enabled).
bool has_partial_hits(const EngineConfig& config, const EngineProfile& profile,
                      std::span<const KVCacheGroupSpec> groups, std::int32_t hash_block_size) {
  if (config.dcp > 1 && !profile.parts_with_context_parallelism) return false;
  const bool fine_states = std::ranges::any_of(groups, [&](const KVCacheGroupSpec& group) {
    const std::int64_t size = group.spec.block_size;
    return is_state_kind(group.spec.kind) && group.spec.mamba_cache_mode == MambaCacheMode::align &&
           (config.dcp > 1 ? size >= hash_block_size : size > hash_block_size);
  });
  return fine_states && (!profile.groups_agree_on_parts ||
                         std::ranges::all_of(groups, [&](const KVCacheGroupSpec& group) {
                           return can_hit_parts(config, group.spec, hash_block_size);
                         }));
}

// Windows are looked up by whole blocks.
Result<void> check_windows(const EngineConfig& config, const EngineProfile& profile,
                           std::span<const KVCacheGroupSpec> groups, BlockSizes sizes) {
  if (!sizes.hits_parts_of_blocks) return {};
  for (const KVCacheGroupSpec& group : groups)
    if (!can_hit_parts(config, group.spec, sizes.hash_block_size))
      return fail(
          "groups: {} has blocks of {} tokens, and hits may end at every {}: {} cannot look that "
          "up",
          name_of(group.spec.kind), group.spec.block_size, sizes.hash_block_size, profile.name);
  return {};
}

// A hit must not end inside a stored row.
Result<void> check_compressed_rows(std::span<const KVCacheGroupSpec> groups, BlockSizes sizes) {
  for (const KVCacheGroupSpec& group : groups)
    for (const KVCacheSpec& spec : specs_of(group))
      if (is_prefix_cacheable(spec) &&
          !fills_rows(spec.tokens_per_state, sizes.cache_hit_alignment_tokens()))
        return fail("tokens_per_state: {}; hits end at multiples of {} tokens",
                    text_of(spec.tokens_per_state), sizes.cache_hit_alignment_tokens());
  return {};
}

Result<BlockSizes> hybrid_sizes(const EngineConfig& config, const EngineProfile& profile,
                                std::span<const KVCacheGroupSpec> groups) {
  const bool parallel = config.dcp != 1 || (profile.shards_by_pcp && config.pcp != 1);
  if (parallel && !profile.context_parallel_hybrids)
    return fail(
        "dcp, pcp: {} and {} with {} KV cache groups; context parallelism needs a single group",
        config.dcp, config.pcp, groups.size());
  std::int64_t lcm = 1;
  std::int64_t gcd = 0;
  std::int64_t gcd_of_all = 0;
  bool one_hash_per_hit = false;
  for (const KVCacheGroupSpec& group : groups) {
    const std::int64_t block_size = num_tokens_in_block(config, group.spec);
    lcm = std::lcm(lcm, block_size);
    gcd_of_all = std::gcd(gcd_of_all, block_size);
    if (is_prefix_cacheable(group.spec)) gcd = std::gcd(gcd, block_size);
    if (is_state_kind(group.spec.kind))
      one_hash_per_hit |= profile.state_hashing == StateHashing::of_equal_blocks
                              ? group.spec.block_size != config.block_size
                              : group.spec.mamba_cache_mode != MambaCacheMode::align;
  }
  const auto scheduler = static_cast<std::int32_t>(lcm);
  if (!config.enable_prefix_caching) return BlockSizes{scheduler, scheduler};
  if (one_hash_per_hit)
    gcd = lcm;
  else if (config.prefix_match_unit != 0)
    gcd = config.prefix_match_unit;
  else if (gcd == 0)
    gcd = gcd_of_all;
  BlockSizes sizes{scheduler, static_cast<std::int32_t>(gcd)};
  for (const KVCacheGroupSpec& group : groups)
    if (is_prefix_cacheable(group.spec) &&
        num_tokens_in_block(config, group.spec) % sizes.hash_block_size != 0)
      return fail(
          "groups: a block of {} tokens is not a multiple of the hash block of {}; turn prefix "
          "caching off or make the block sizes equal",
          group.spec.block_size, sizes.hash_block_size);
  sizes.hits_parts_of_blocks = profile.hits_parts_of_blocks &&
                               has_partial_hits(config, profile, groups, sizes.hash_block_size);
  LS_RETURN_IF_ERROR(check_windows(config, profile, groups, sizes));
  LS_RETURN_IF_ERROR(check_compressed_rows(groups, sizes));
  return sizes;
}

Result<void> check_retention(const EngineConfig& config, const EngineProfile& profile,
                             std::span<const KVCacheGroupSpec> groups, BlockSizes sizes) {
  const std::int32_t interval = config.prefix_cache_retention_interval;
  if (interval == kDenseRetention) return {};
  if (!profile.retains_sparsely)
    return fail("prefix_cache_retention_interval: {}; {} keeps every state and window", interval,
                profile.name);
  const bool any_sparse = std::ranges::any_of(groups, [](const KVCacheGroupSpec& group) {
    return is_state_kind(group.spec.kind) || is_sliding_window(group.spec.kind);
  });
  if (interval < 0 || interval % sizes.scheduler_block_size != 0)
    return fail("prefix_cache_retention_interval: {}; expected a multiple of the block size {}",
                interval, sizes.scheduler_block_size);
  if (interval > 0 && !any_sparse)
    return fail("prefix_cache_retention_interval: no group keeps states or windows; expected 0");
  return {};
}

// A stated lookahead must be the engine core's, which follows only from its own configuration.
Result<void> check_hash_lookahead(const EngineConfig& config, const EngineProfile& profile) {
  EngineConfig unstated = config;
  unstated.num_hash_lookahead_tokens = kEngineHashLookahead;
  const std::int32_t own = hash_lookahead_of(unstated, profile);
  const std::int32_t stated = hash_lookahead_of(config, profile);
  if (stated == own || stated == 0) return {};
  return fail(
      "num_hash_lookahead_tokens: {}; expected {}: {}", config.num_hash_lookahead_tokens, own,
      own == 0 ? fmt::format("{} hashes these blocks without the tokens after them", profile.name)
               : "as many as num_prefill_lookahead_tokens, or none");
}

Result<void> check_prefix_caching(const EngineConfig& config, const EngineProfile& profile,
                                  std::span<const KVCacheGroupSpec> groups, BlockSizes sizes) {
  if (Result<void> checked = check_hash_lookahead(config, profile); !checked) return checked;
  const auto is_cacheable = [](const KVCacheGroupSpec& group) {
    return is_prefix_cacheable(group.spec);
  };
  if (groups.size() > 1 && std::ranges::none_of(groups, is_cacheable))
    return fail("groups: no group is cached; turn prefix caching off");
  const bool one_spec = std::ranges::all_of(
      groups, [&](const KVCacheGroupSpec& group) { return group.spec == groups[0].spec; });
  if (groups.size() > 1 && one_spec && !profile.hybrids_of_one_spec)
    return fail(
        "groups: {} of one spec; {} caches prefixes of several groups only when their specs differ",
        groups.size(), profile.name);
  for (const KVCacheGroupSpec& group : groups) {
    const KVCacheSpec& spec = group.spec;
    if (is_state_kind(spec.kind) && spec.mamba_cache_mode != MambaCacheMode::align &&
        !profile.caches_states_in_mode_all)
      return fail("mamba_cache_mode: {} with prefix caching; {} caches states in mode align only",
                  name_of(spec.mamba_cache_mode), profile.name);
    const bool windowed = is_windowed(spec.kind);
    if ((windowed || is_ring(spec)) && config.dcp > 1 && spec.dcp_sharded)
      return fail("dcp: {} with a {} group; context parallelism cannot divide windows or rings",
                  config.dcp, name_of(spec.kind));
    if (is_chunked(spec.kind) && config.spec_method == SpecMethod::eagle &&
        hash_lookahead_of(config, profile) == 0)
      return fail(
          "spec_method: eagle with a chunked_local group; {} cannot drop the last block of its "
          "hits",
          profile.name);
    if (is_chunked(spec.kind) && spec.block_size != sizes.cache_hit_alignment_tokens())
      return fail(
          "groups: chunked_local has blocks of {} tokens; with prefix caching expected {} in every "
          "group",
          spec.block_size, sizes.cache_hit_alignment_tokens());
  }
  if (sizes.scheduler_block_size < config.num_prefill_lookahead_tokens &&
      config.spec_method == SpecMethod::eagle)
    return fail("num_prefill_lookahead_tokens: {}; expected at most the block size {}",
                config.num_prefill_lookahead_tokens, sizes.scheduler_block_size);
  return {};
}

}  // namespace

Result<BlockSizes> planned_block_sizes(const EngineConfig& config,
                                       std::span<const KVCacheGroupSpec> groups) {
  const EngineProfile& profile = engine_profile(config.engine);
  return groups.size() == 1 ? single_group_sizes(config, profile, groups[0].spec)
                            : hybrid_sizes(config, profile, groups);
}

Result<BlockSizes> resolve_block_sizes(const EngineConfig& config,
                                       std::span<const KVCacheGroupSpec> groups) {
  if (groups.empty()) return fail("groups: none given; expected at least one KV cache group");
  const EngineProfile& profile = engine_profile(config.engine);
  Result<BlockSizes> sizes = planned_block_sizes(config, groups);
  if (!sizes) return sizes;
  LS_RETURN_IF_ERROR(check_retention(config, profile, groups, *sizes));
  if (!config.enable_prefix_caching) return sizes;
  LS_RETURN_IF_ERROR(check_prefix_caching(config, profile, groups, *sizes));
  return sizes;
}

std::int32_t num_hash_lookahead_tokens_of(const EngineConfig& config) {
  return hash_lookahead_of(config, engine_profile(config.engine));
}

}  // namespace lockstep
