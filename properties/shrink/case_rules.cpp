#include "properties/shrink/case_rules.h"

#include <algorithm>
#include <array>

#include "properties/invariants/planned_need.h"
#include "properties/shrink/case_parts.h"

namespace lockstep {
namespace {

bool step_has_room(const SavedCase& saved) {
  const EngineConfig& engine = saved.engine;
  if (engine.max_num_batched_tokens < engine.max_num_seqs) return false;
  return engine.enable_chunked_prefill || engine.max_num_batched_tokens >= engine.max_model_len;
}

bool long_prefills_are_below(const SavedCase& saved) {
  return saved.engine.long_prefill_token_threshold <= saved.engine.max_model_len;
}

bool pool_holds_the_longest(const SavedCase& saved) {
  return 1 + planned_blocks_of_request(saved.engine, saved.cache.groups) <= saved.cache.num_blocks;
}

bool requests_fit(const SavedCase& saved) {
  return std::ranges::all_of(requests_of(saved), [&](const RequestSpec* request) {
    return request->prompt.size() + request->max_tokens <= saved.engine.max_model_len;
  });
}

bool drafts_have_a_method(const SavedCase& saved) {
  const bool drafts = saved.engine.num_spec_tokens > 0;
  if (drafts != (saved.engine.spec_method != SpecMethod::none)) return false;
  return std::ranges::all_of(saved.cache.groups, [&](const KVCacheGroupSpec& group) {
    return group.spec.kind != CacheKind::mamba ||
           group.spec.num_speculative_blocks == saved.engine.num_spec_tokens;
  });
}

bool states_have_one_mode(const SavedCase& saved) {
  if (!has_states(saved)) return true;
  const bool saves = saved.engine.mamba_cache_mode != MambaCacheMode::none;
  if (saves != saved.engine.enable_prefix_caching) return false;
  return std::ranges::all_of(saved.cache.groups, [&](const KVCacheGroupSpec& group) {
    if (group.spec.kind != CacheKind::mamba) return true;
    return group.spec.mamba_cache_mode == saved.engine.mamba_cache_mode &&
           (saves || group.spec.block_size >= saved.engine.max_model_len);
  });
}

bool aligned_steps_reach_a_block(const SavedCase& saved) {
  if (!has_states(saved) || saved.engine.mamba_cache_mode != MambaCacheMode::align) return true;
  const std::int64_t threshold = saved.engine.long_prefill_token_threshold;
  return saved.engine.enable_chunked_prefill &&
         std::ranges::all_of(saved.cache.groups, [&](const KVCacheGroupSpec& group) {
           return group.spec.block_size <= saved.engine.max_num_batched_tokens &&
                  (threshold == 0 || group.spec.block_size <= threshold);
         });
}

bool windows_are_tokens(const SavedCase& saved) {
  return std::ranges::all_of(saved.cache.groups, [](const KVCacheGroupSpec& group) {
    const bool window = group.spec.kind == CacheKind::sliding_window;
    const bool chunk = group.spec.kind == CacheKind::chunked_local;
    return (!window || group.spec.sliding_window > 1) &&
           (!chunk || group.spec.attention_chunk_size > 0);
  });
}

constexpr std::array kRules = {
    step_has_room,        long_prefills_are_below, pool_holds_the_longest,      requests_fit,
    drafts_have_a_method, states_have_one_mode,    aligned_steps_reach_a_block, windows_are_tokens};

}  // namespace

BrokenRules broken_rules(const SavedCase& saved) {
  BrokenRules broken = 0;
  for (std::size_t i = 0; i < kRules.size(); ++i)
    if (!kRules[i](saved)) broken |= BrokenRules{1} << i;
  return broken;
}

}  // namespace lockstep
