#include "properties/invariants/planned_need.h"

#include "reference/plan/request_need.h"
#include "reference/profiles/engine_profile.h"

namespace lockstep {

PlanOptions plan_options_of(const EngineConfig& engine) {
  PlanOptions options;
  options.max_model_len = engine.max_model_len;
  options.max_num_batched_tokens = engine.max_num_batched_tokens;
  options.mamba_cache_mode = engine.mamba_cache_mode;
  options.num_spec = engine.num_spec_tokens;
  options.dcp = engine.dcp;
  // Ranks of prefill context parallelism share out the tokens in 0.22.1 only.
  const EngineProfile* profile = find_engine_profile(engine.engine);
  if (profile == nullptr || profile->shards_by_pcp) options.pcp = engine.pcp;
  return options;
}

std::int64_t planned_blocks_of_request(const EngineConfig& engine,
                                       std::span<const KVCacheGroupSpec> groups) {
  PlanOptions options = plan_options_of(engine);
  if (engine.async_scheduling) options.max_num_batched_tokens *= 2;
  std::int64_t blocks = 0;
  for (const KVCacheGroupSpec& group : groups) blocks += max_blocks_per_request(group, options);
  return blocks;
}

}  // namespace lockstep
