// Decode context parallelism with sharded and replicated caches in one model: full attention is
// sharded over the ranks by tokens; windows, rings and states are replicated.
#include <algorithm>
#include <numeric>
#include <utility>

#include "properties/generate/generator_parts.h"

namespace lockstep {
namespace {

// Returns true if the group's tokens can be sharded: attention to all of a request's own tokens.
bool has_tokens_to_deal_out(const KVCacheGroupSpec& group) {
  const CacheKind kind = group.spec.kind;
  return attends_to_all(kind) && !reads_beside_tokens(group.spec);
}
// Returns true if every rank must store the whole group. A case with a window that is recomputed
// after a hit is left unchanged.
bool stays_whole(const KVCacheGroupSpec& group) {
  const CacheKind kind = group.spec.kind;
  return is_ring(kind) || is_state_kind(kind) ||
         (is_sliding_window(kind) && !group.spec.bounded_replay);
}

// Returns the interleave: consecutive tokens per rank, a multiple of the tokens of every compressed
// row and a divisor of every sharded block. vLLM 0.33.0 asserts the latter (config/vllm.py,
// validate_block_size()). 0: no such number exists.
std::int32_t draw_interleave(ChoiceSource& choices, const std::vector<KVCacheGroupSpec>& groups) {
  std::int64_t row = 1, block = 0;
  for (const KVCacheGroupSpec& group : groups) {
    if (!is_dealt_out(group.spec)) continue;
    row = std::lcm(row, group.spec.tokens_per_state.tokens);
    block = std::gcd(block, group.spec.block_size);
  }
  // Chosen before the test, so that every case consumes the choice.
  const std::int64_t drawn = row * choices.one_of<std::int64_t>({1, 2, 4});
  if (block % row != 0) return 0;
  return static_cast<std::int32_t>(block % drawn == 0 ? drawn : row);
}

}  // namespace

void draw_whole_caches(Draw& draw, SavedCase& saved) {
  if (!draw.has(Feature::whole_caches) || draw.has(Feature::two_block_pool) ||
      draw.options.worker ||
      !release_takes(saved.engine, {RunTrait::replicated_caches, RunTrait::context_ranks}) ||
      saved.tensor_parallel_size * saved.pipeline_parallel_size * saved.data_parallel_size != 1 ||
      !saved.cache.draft_modules.empty() || saved.engine.prefix_match_unit != 0 ||
      !saved.connector.parts.empty())
    return;
  ChoiceSource& choices = draw.choices;
  SavedCase changed = saved;
  changed.engine.dcp = choices.one_of({2, 2, 3, 4});
  changed.engine.pcp = 1;
  std::vector<KVCacheGroupSpec> groups = saved.cache.groups;
  const auto dealt_out = std::ranges::find_if(groups, has_tokens_to_deal_out);
  if (dealt_out == groups.end() || !std::ranges::all_of(groups, [](const KVCacheGroupSpec& group) {
        return has_tokens_to_deal_out(group) || stays_whole(group);
      }))
    return;
  const std::string dealt_out_name = dealt_out->layer_names.front();
  // The only group is sharded, and a copy of it is replicated.
  if (groups.size() == 1) {
    KVCacheGroupSpec& whole = groups.emplace_back(groups.front());
    for (std::string& name : whole.layer_names) name = "whole." + name;
    whole.spec.dcp_sharded = false;
    for (KVCacheSpec& spec : whole.layer_specs) spec.dcp_sharded = false;
  }
  // The first full-attention group always stays sharded, and each other one with a chance of 40
  // percent.
  for (KVCacheGroupSpec& group : groups) {
    if (group.layer_names.front() == dealt_out_name || is_state_kind(group.spec.kind)) continue;
    if (!stays_whole(group) && choices.chance(40)) continue;
    group.spec.dcp_sharded = false;
    for (KVCacheSpec& spec : group.layer_specs) spec.dcp_sharded = false;
  }
  changed.cp_kv_cache_interleave_size = draw_interleave(choices, groups);
  SavedCase next;
  if (changed.cp_kv_cache_interleave_size > 0 &&
      lay_out_again(changed, std::move(groups), saved.engine, next))
    saved = std::move(next);
}

}  // namespace lockstep
