// From layers and memory to a plan: groups, shared tensors, and the number of blocks.
//
// 1. Tensor i is shared by the i-th layer (or pack) of every group; sizes are num_blocks pages.
// 2. num_blocks = memory // (page * tensors), or the override; the smallest worker's applies to
//    all, and the tensors of the others shrink in proportion.
// 3. A returned plan holds one request of max_model_len, and max_num_seqs states if requested.
// 4. Nothing is capped silently: what does not fit is an Error that states what would.
// Rules: vllm/v1/core/kv_cache_utils.py (get_kv_cache_configs).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/result.h"
#include "reference/plan/alignment.h"
#include "reference/types/plan_options.h"

namespace lockstep {

struct TensorPlan {
  AlignedSizes aligned;
  LayerSpecs layers;                   // of all workers, sizes put in
  std::vector<KVCacheConfig> workers;  // one a pipeline stage; the same groups, their own layers
  std::vector<std::string> warnings;   // the plan works as the engine's, with a disadvantage
};

// Aligns, then plans. Each worker's layers are given apart; a model on one device is one worker.
Result<TensorPlan> plan_memory(const std::vector<LayerSpecs>& workers,
                               const std::vector<std::int64_t>& memory_bytes,
                               const PlanOptions& options);
Result<TensorPlan> plan_memory(const LayerSpecs& layers, const PlanOptions& options);

// The plan of one worker whose groups are known. Requires room for at least one block.
KVCacheConfig kv_cache_config(std::vector<KVCacheGroupSpec> groups, std::int64_t memory_bytes,
                              const PlanOptions& options);

// The layers cut into `pp` runs of nearly equal length; what does not divide goes to the stages
// before the last one (vllm/distributed/utils.py, get_pp_indices).
std::vector<LayerSpecs> pipeline_stages(const LayerSpecs& layers, std::int64_t pp);

}  // namespace lockstep
