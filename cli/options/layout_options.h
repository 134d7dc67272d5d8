// The options of a memory plan on the command line, shared by `layout` and `capacity`.
#pragma once

#include <cstdint>
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

// The options as typed. plan_options() parses the words and fills in what depends on the model.
struct LayoutArguments {
  // Options that are stored as they are: ranks, sizes, counts.
  PlanOptions plan{.max_model_len = 0};  // 0: the model's, at most 32,768
  std::string kv_dtype = "auto";         // "auto": that of the model or its checkpoint
  std::string ssm_dtype;
  std::string mamba_cache_mode = "none";
  std::string backend;  // empty: as the engine chooses
  std::string layout = "NHD";
  std::string engine = EngineConfig{}.engine;  // release whose planner runs
  std::string memory = "40GiB";
  std::string host_pool;                 // size of the pool of host pages; empty: none
  std::int64_t hidden_state_layers = 0;  // layers whose hidden states are extracted; 0: none
  std::int64_t hidden_size = 4096;       // elements of one layer's hidden state
};

// Declares all options except those that `capacity` varies: K/V dtype, cache mode, pack.
void add_layout_options(CLI::App& command, LayoutArguments& arguments);

// Returns the options of a plan of `model`. Errors: an unknown word, a size that is not one, an
// option that the release's planner does not have.
Result<PlanOptions> plan_options(const LayoutArguments& arguments, const ModelSpec& model);

// True if the engine's groups overlay one allocation (reference/placement/). An Error: an
// unknown release.
Result<bool> is_placed(const LayoutArguments& arguments);

// Returns remarks for a plan: another release's rules made it, it leaves out the draft model's
// layers, no prompt can fill a block. `hit_step_tokens`: prefix hits are multiples of it; 0:
// nothing is hit.
std::vector<std::string> plan_warnings(const LayoutArguments& arguments, const ModelSpec& model,
                                       const PlanOptions& options, std::int64_t hit_step_tokens);

// Returns bytes: "40GiB", "40G" (also 2^30), "512MiB", "42949672960". Refuses more than 2^50 bytes:
// products of larger sizes could overflow.
Result<std::int64_t> parse_size(std::string_view option, std::string_view text);

}  // namespace lockstep
