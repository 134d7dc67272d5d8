#include "reference/plan/compatibility.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>

#include "reference/plan/block_sizes.h"
#include "reference/profiles/releases.h"
#include "reference/types/engine_config.h"
#include "reference/types/hisparse.h"

namespace lockstep {
namespace {

using enum RunTrait;
using Scope = CompatibilityRow::Scope;

bool is_window(const KVCacheSpec& spec) { return spec.kind == CacheKind::sliding_window; }

void add_special_rows(const KVCacheGroupSpec& group, RunTraits& traits) {
  const KVCacheSpec& spec = group.spec;
  const bool cacheable = is_prefix_cacheable(spec);
  if (cacheable && !has_compressed_rows(group)) return;
  traits.add(special_rows);
  traits.add_if(has_compressed_rows(group), compressed_rows);
  traits.add_if(
      is_ring(spec) ? spec.dcp_sharded : !cacheable || spec.model_version == "deepseek_v4",
      unshared_rows);
}

void add_kind(const KVCacheGroupSpec& group, RunTraits& traits) {
  const KVCacheSpec& spec = group.spec;
  const bool has_states = spec.kind == CacheKind::mamba;
  const bool has_tokens = spec.kind == CacheKind::full_attention || spec.kind == CacheKind::mla;
  const bool has_chunks = spec.kind == CacheKind::chunked_local;
  traits.add_if(has_states, states);
  traits.add_if(has_states && spec.mamba_cache_mode == MambaCacheMode::all, states_in_mode_all);
  traits.add_if(spec.num_prefill_checkpoint_blocks != 0, checkpoints);
  traits.add_if(is_ring(spec), rings);
  traits.add_if(spec.extra_retained_tokens != 0, retained_windows);
  traits.add_if(has_states || has_chunks || (is_window(spec) && !spec.bounded_replay),
                cached_prefixes);
  traits.add_if(spec.kind == CacheKind::encoder_only, encoder_only);
  traits.add_if(is_cross_attention(spec), cross_attention);
  traits.add_if(spec.rswa_window > 0, reference_windows);
  traits.add_if(reads_beside_tokens(spec), special_attention);
  traits.add_if(!spec.dcp_sharded, replicated_caches);
  traits.add_if(!has_tokens && !is_window(spec), untransferred);
  const bool is_replicated =
      !spec.dcp_sharded && !spec.bounded_replay && (is_window(spec) || is_ring(spec));
  traits.add_if(!has_tokens && !has_states && !is_replicated, undivided_tokens);
  traits.add_if(belongs_to_hisparse(group), hisparse);
  traits.add_if(
      !group.role.empty() && group.role != kHiSparseSource && group.role != kHiSparseIndexer,
      unknown_role);
}

}  // namespace

RunFacts facts_of(const EngineConfig& config, std::span<const KVCacheGroupSpec> groups) {
  RunFacts facts{find_engine_profile(config.engine), {}};
  RunTraits& traits = facts.traits;
  std::int64_t recomputed = 0;  // tokens
  for (const KVCacheGroupSpec& group : groups) {
    add_kind(group, traits);
    add_special_rows(group, traits);
    traits.add_if(group.spec.sink_len > 0, traits.has(sinks) ? several_sinks : sinks);
    if (!group.spec.bounded_replay) continue;
    traits.add(recomputed_windows);
    traits.add_if(recomputed != 0 && recomputed != group.spec.sliding_window, unequal_windows);
    recomputed = group.spec.sliding_window;
  }
  traits.add_if(groups.size() > 1, several_groups);
  traits.add_if(config.enable_prefix_caching, prefix_caching);
  traits.add_if(config.enable_chunked_prefill, chunked_prefill);
  traits.add_if(config.async_scheduling, async_scheduling);
  traits.add_if(config.num_spec_tokens > 0, drafts);
  traits.add_if(config.num_prefill_lookahead_tokens > 1, draft_modules);
  traits.add_if(config.prefix_match_unit != 0, prefix_match_unit);
  traits.add_if(config.hash_algorithm != HashAlgorithm::content, engine_hashes);
  if (config.dcp * config.pcp == 1) return facts;
  traits.add(context_ranks);
  if (facts.engine == nullptr) return facts;
  const auto sizes = resolve_block_sizes(config, groups);
  traits.add_if(sizes && sizes->hits_parts_of_blocks, hits_inside_blocks);
  return facts;
}

namespace {

bool applies(const CompatibilityRow& row, const RunFacts& facts) {
  return facts.traits.has_all_of(row.with) && !facts.traits.has_any_of(row.without) &&
         (row.of == nullptr || (facts.engine != nullptr && row.of(*facts.engine)));
}

const CompatibilityRow* first_row(const RunFacts& facts, bool with_memory) {
  for (const CompatibilityRow& row : compatibility()) {
    if (row.scope == Scope::memory && !with_memory) continue;
    if (row.scope == Scope::decisions && facts.traits.has(other_engine)) continue;
    if (applies(row, facts)) return &row;
  }
  return nullptr;
}

Result<void> answer(const RunFacts& facts, const CompatibilityRow* row) {
  if (row == nullptr) return {};
  const std::string_view engine = facts.engine == nullptr ? "this engine" : facts.engine->name;
  return fail(text_of(*row, engine) + (row->scope == Scope::memory ? ", or --backend none" : ""));
}

}  // namespace

bool is_supported(const RunFacts& facts) { return first_row(facts, false) == nullptr; }

Result<void> supported(const RunFacts& facts) { return answer(facts, first_row(facts, false)); }

Result<void> supported_with_memory(const RunFacts& facts) {
  return answer(facts, first_row(facts, true));
}

std::string text_of(const CompatibilityRow& row, std::string_view engine) {
  std::string text;
  for (std::size_t i = 0; i < 2 * kNumRunTraits; ++i) {
    const bool is_absent = i >= kNumRunTraits;
    const auto trait = static_cast<RunTrait>(i % kNumRunTraits);
    if (!(is_absent ? row.without : row.with).has(trait)) continue;
    text += fmt::format("{}{}",
                        is_absent      ? " without "
                        : text.empty() ? ""
                                       : " with ",
                        name_of(trait));
  }
  return fmt::format("{}: {}", text,
                     fmt::format(fmt::runtime(row.words), fmt::arg("engine", engine),
                                 fmt::arg("modelled", names_of_connector_releases())));
}

}  // namespace lockstep
