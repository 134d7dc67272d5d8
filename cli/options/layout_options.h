// The options of a plan on the command line, shared by `layout` and `capacity`.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "reference/plan/model_spec.h"
#include "reference/types/engine_config.h"
#include "reference/types/plan_options.h"

namespace CLI {
class App;
}

namespace lockstep {

// As typed; plan_options() gives them their meaning.
struct LayoutArguments {
  // Options that need none: ranks, sizes, counts.
  PlanOptions plan{.max_model_len = 0};  // 0: the model's, at most 32,768
  std::string kv_dtype = "auto";         // as the model or its checkpoint has it
  std::string ssm_dtype;
  std::string mamba_cache_mode = "none";
  std::string backend = "flash_attn";
  std::string layout = "NHD";
  std::string engine = EngineConfig{}.engine;  // whose planner
  std::string memory = "40GiB";
  std::string host_pool;  // size of the pool of host pages; empty: none
  std::int64_t hidden_state_layers = 0;
  std::int64_t hidden_size = 4096;
};

// Everything but what `capacity` varies: K/V dtype, cache mode, pack.
void add_layout_options(CLI::App& command, LayoutArguments& arguments);

Result<PlanOptions> plan_options(const LayoutArguments& arguments, const ModelSpec& model);

// True if the engine's groups overlay one allocation (reference/placement/). An Error: an
// unknown release.
Result<bool> is_placed(const LayoutArguments& arguments);

// Remarks that belong under a plan: the rules of another release made it, it leaves out the draft
// model's layers, no prompt can fill a block. `hit_step_tokens`: hits are multiples of it; 0: none.
std::vector<std::string> plan_warnings(const LayoutArguments& arguments, const ModelSpec& model,
                                       const PlanOptions& options, std::int64_t hit_step_tokens);

// "40GiB", "40G", "512MiB", "42949672960".
Result<std::int64_t> parse_size(std::string_view text);

}  // namespace lockstep
