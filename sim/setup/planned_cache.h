// The cache of a replay whose trace has no plan: that of a RunRecipe (equal layers, or a catalogue
// model's layers as the planner lays them out), and its KV connectors.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/result.h"
#include "reference/types/kv_cache_spec.h"
#include "sim/connectors/connect.h"
#include "traces/formats/run_fields.h"
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

// Before there is a plan: whether the engine may give its connectors several KV cache groups.
// Refused: options that need a connector or another one, several groups that the user insists on
// and a part does not take.
Result<bool> hybrid_groups_of(const GivenRun& given, const RunSpec& run);

// With the plan: a host tier is as large as the pool unless --host-blocks says more.
void size_host_tier(const GivenRun& given, RunSpec& run);

}  // namespace lockstep
