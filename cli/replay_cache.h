// The cache that a trace is replayed with: layers described on the command line, or those of a
// model of the catalogue as the planner lays them out.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/result.h"
#include "cli/replay_options.h"
#include "reference/types/engine_config.h"
#include "reference/types/kv_cache_spec.h"

namespace lockstep {

// `num_blocks` absent: one and a half times what the longest request holds, and a sentence about it
// in `chosen`. Without `hybrid_groups` all layers of a model are kept alike, in one group. What the
// plan decides for the engine (block sizes, the mode of states) is put into `engine`. Errors: an
// unknown model, a pool too small for one request of max_model_len.
Result<KVCacheConfig> plan_replay_cache(const ReplayOptions& options,
                                        std::optional<std::int64_t> num_blocks, bool hybrid_groups,
                                        EngineConfig& engine, std::vector<std::string>& chosen);

}  // namespace lockstep
