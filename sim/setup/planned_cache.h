// The cache of a replay whose trace has no plan: that of a RunRecipe (equal layers, or a catalogue
// model's layers as the planner lays them out).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/result.h"
#include "reference/types/kv_cache_spec.h"
#include "traces/formats/run_spec.h"

namespace lockstep {

// An option for which a server of the release has a default, and what the run has.
struct ServedOption {
  std::string name;        // as in run_fields.h, or prefill_checkpoint_alignment
  std::string value;       // of the run
  std::string by_default;  // of the release
  std::string said_by;     // "release", "trace" or "command line"
  bool operator==(const ServedOption&) const = default;
};

struct CacheWishes {
  // Absent: one and a half times what the longest request holds.
  std::optional<std::int64_t> num_blocks;
  bool says_block_size = false;  // the engine's is not the default, but asked for
  bool hybrid_groups = true;     // false: all layers of a model share one group
  // States as the release serves them (model_spec.h), except options that were set: the mode
  // by the engine, no checkpoints by the recipe. Otherwise in mode align, without checkpoints.
  bool as_served = false;
  bool says_cache_mode = false;
};

// The plan of run.recipe. Stores its decisions for the engine (block sizes, the mode of states) in
// run.engine, one line per choice in `chosen`, and a server's choices in `served`. Errors: an
// unknown model, a pool too small for one request of max_model_len.
Result<KVCacheConfig> plan_replay_cache(RunSpec& run, const CacheWishes& wishes,
                                        std::vector<std::string>& chosen,
                                        std::vector<ServedOption>& served);

}  // namespace lockstep
