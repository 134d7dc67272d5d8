// The cache that a trace is replayed with: layers described on the command line, or those of a
// model of the catalogue as the planner lays them out.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/result.h"
#include "reference/types/kv_cache_spec.h"
#include "traces/formats/run_spec.h"

namespace lockstep {

struct CacheWishes {
  // Absent: one and a half times what the longest request holds.
  std::optional<std::int64_t> num_blocks;
  bool says_block_size = false;  // the engine's is not the default, but asked for
  bool hybrid_groups = true;     // false: all layers of a model are kept alike, in one group
};

// The plan of run.recipe. What it decides for the engine (block sizes, the mode of states) is put
// into run.engine, and a sentence about each choice into `chosen`. Errors: an unknown model, a pool
// too small for one request of max_model_len.
Result<KVCacheConfig> plan_replay_cache(RunSpec& run, const CacheWishes& wishes,
                                        std::vector<std::string>& chosen);

}  // namespace lockstep
