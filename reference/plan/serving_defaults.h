// Defaults of a release's server for options that are not set (`vllm serve MODEL`).
//
// 1. The options that the model supports: asynchronous scheduling, reservation, retention, where
//    states are kept, and whether a prefill exports one from inside a chunk. The sizes of a batch
//    follow the GPU, and are not here.
// 2. Kernels are those of a Hopper GPU; elsewhere a release may serve without checkpoints.
// 3. A profile with its own policies is served as its release is.
// Read in vllm/config/{scheduler,cache,vllm}.py, vllm/model_executor/models/config.py and
// get_kv_cache_spec() of the layers, of every release from 0.20.2 to 0.33.0.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>

#include "reference/plan/model_spec.h"
#include "reference/types/engine_config.h"

namespace lockstep {

struct ServingDefaults {
  bool async_scheduling = true;
  bool scheduler_reserve_full_isl = true;
  std::int32_t prefix_cache_retention_interval = kDenseRetention;
};

// `engine` says the release and the drafts.
ServingDefaults serving_defaults(const EngineConfig& engine);

// Where the states of `model` are kept for prefix hits; none: without prefix caching or states.
MambaCacheMode served_cache_mode(const EngineConfig& engine, const ModelSpec& model);

// Tokens of a block of states in a plan of these layers.
using StateBlock = std::function<Result<std::int64_t>(const LayerSpecs&)>;

// Puts into the specs of states what their mixers export from inside a prefill: as the release
// does, or as the model file says. Gated delta nets export on the grid of their own blocks, which
// `state_block` computes; without it, aligned_sizes(). REQUIRES: options.mamba_cache_mode is the
// layers'. Refused: what state_block refuses.
Result<void> take_served_checkpoints(std::string_view release, const ModelSpec& model,
                                     const PlanOptions& options, LayerSpecs& layers,
                                     const StateBlock& state_block = {});

}  // namespace lockstep
