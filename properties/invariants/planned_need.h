// What a pool is planned with: the options of an engine that its check at start reads.
#pragma once

#include <cstdint>
#include <span>

#include "reference/types/engine_config.h"
#include "reference/types/kv_cache_spec.h"
#include "reference/types/plan_options.h"

namespace lockstep {

PlanOptions plan_options_of(const EngineConfig& engine);
// Blocks that one request of max_model_len takes, all groups together; with a step in flight two
// batches hold their windows at once.
std::int64_t planned_blocks_of_request(const EngineConfig& engine,
                                       std::span<const KVCacheGroupSpec> groups);

}  // namespace lockstep
