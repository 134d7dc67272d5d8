// Options of the engine. Combinations that the engine refuses to start with are not drawn.
#include <algorithm>

#include "properties/generate/generator_parts.h"
#include "reference/plan/page_size.h"

namespace lockstep {

void draw_engine(Draw& draw, EngineConfig& engine) {
  ChoiceSource& choices = draw.choices;
  engine.engine = choices.one_of({"vllm-0.33.0", "vllm-0.22.1"});
  if (!draw.options.engine.empty()) engine.engine = draw.options.engine;
  engine.block_size =
      static_cast<std::int32_t>(draw.runs_kernels() ? 16 : choices.one_of({4, 2, 4, 8, 16, 3}));
  const std::int64_t blocks_max = draw.has(Feature::long_prompts) ? 10 : 4;
  engine.max_model_len = static_cast<std::int32_t>(
      engine.block_size + choices.between(1, blocks_max * engine.block_size));
  if (draw.has(Feature::two_block_pool)) engine.max_model_len = engine.block_size;
  engine.max_num_seqs = static_cast<std::int32_t>(choices.between(1, 5));
  engine.enable_prefix_caching = draw.has(Feature::prefix_caching);
  engine.async_scheduling = draw.has(Feature::async_scheduling);
  engine.scheduler_reserve_full_isl = !draw.has(Feature::no_full_isl_reserve);
  engine.policy =
      draw.has(Feature::priority_policy) ? SchedulingPolicy::priority : SchedulingPolicy::fcfs;
  if (!draw.has(Feature::drafts)) return;
  engine.spec_method =
      choices.one_of({SpecMethod::ngram, SpecMethod::draft_model, SpecMethod::eagle});
  engine.num_spec_tokens = static_cast<std::int32_t>(choices.between(1, 3));
}

// Ranks share out the tokens of full attention; the releases differ in which of them hold what. The
// audit follows one group of them.
void draw_ranks(Draw& draw, const std::vector<KVCacheGroupSpec>& groups, EngineConfig& engine) {
  if (!draw.has(Feature::context_parallel) || draw.has(Feature::two_block_pool)) return;
  const CacheKind kind = groups.front().spec.kind;
  if (groups.size() > 1 || (kind != CacheKind::full_attention && kind != CacheKind::mla)) return;
  engine.dcp = draw.choices.one_of({2, 2, 3, 4, 1});
  engine.pcp = draw.choices.one_of({1, 1, 2});
}

void fit_engine(Draw& draw, const std::vector<KVCacheGroupSpec>& groups, EngineConfig& engine) {
  ChoiceSource& choices = draw.choices;
  // A chunk must be able to reach the next state, and every request its decode and drafts.
  std::int64_t least = engine.max_num_seqs * (1 + engine.num_spec_tokens) + 1;
  std::int64_t scheduler_block = 1;
  for (const KVCacheGroupSpec& group : groups) {
    scheduler_block = std::max(scheduler_block, group.spec.block_size);
    if (engine.mamba_cache_mode == MambaCacheMode::align && is_state_kind(group.spec.kind))
      least = std::max(least, group.spec.block_size + engine.max_num_seqs);
  }
  engine.enable_chunked_prefill = !draw.has(Feature::no_chunked_prefill);
  if (!engine.enable_chunked_prefill)
    least = std::max<std::int64_t>(least, engine.max_model_len + engine.max_num_seqs);
  engine.max_num_batched_tokens = static_cast<std::int32_t>(least + choices.one_of({0, 3, 16, 64}));
  if (draw.has(Feature::long_prefill_threshold)) {
    const std::int64_t low = engine.mamba_cache_mode == MambaCacheMode::align ? scheduler_block : 1;
    engine.long_prefill_token_threshold = static_cast<std::int32_t>(
        std::min<std::int64_t>(low + choices.below(16), engine.max_model_len));
  }
  draw_ranks(draw, groups, engine);
  const bool is_newer = engine.engine == "vllm-0.33.0";
  if (is_newer && draw.has(Feature::sparse_retention) && engine.enable_prefix_caching)
    engine.prefix_cache_retention_interval =
        static_cast<std::int32_t>(choices.below(4) * scheduler_block);
}

}  // namespace lockstep
