// The share of a rank of tensor and pipeline parallelism: its allocation, and its heads and layers
// of the model, derived from its ranks and the model's configuration as a worker does. Rule (14) of
// sim/protocol/backend.h; the reference has its own (reference/plan/rank_plan.h).
//
// 1. Without such parallelism the plan is the model's, with every layer and head.
// 2. A rank allocates num_blocks pages for each of its own tensors.
// 3. What cannot be divided evenly is refused; nothing is rounded.
#pragma once

#include <cstdint>
#include <vector>

#include "base/result.h"
#include "sim/protocol/backend.h"

namespace lockstep::cuda {

// The place of one of the rank's layers in the model.
struct LayerOfModel {
  std::int32_t number = 0;       // of the layer, group by group
  std::int32_t head_begin = 0;   // its first KV head; of states, the rank's part
  std::int32_t query_begin = 0;  // its first query head
  std::int32_t queries_per_kv = 1;
};

struct RankShare {
  KVCacheConfig plan;
  std::vector<LayerOfModel> layers;  // of the plan, group by group
};

Result<RankShare> share_of_rank(const BackendConfig& config);

}  // namespace lockstep::cuda
