// What one rank of tensor and pipeline parallelism keeps of a model's cache: its own plan, derived
// from the whole model's, and the positions of its layers and heads in the whole.
//
// 1. A rank holds num_kv_heads / tp consecutive heads; if tp is larger, every head is on tp /
//    num_kv_heads consecutive ranks. MLA rows and hidden states are replicated on every rank.
// 2. A rank holds one of tp equal parts of a state tensor: of heads or channels, which are the
//    first dimension in a tensor of three dimensions and in the last of several, and the last
//    dimension in the others (convolutions: [kept tokens, channels]).
// 3. A stage holds the layers whose number (the one in their name) is in its run of the model's
//    layers; runs are nearly equal, and the stages before the last take the remainder.
// 4. Groups, block sizes and num_blocks are those of the replicated on every rank; one block table
//    serves them all. Pages and tensors are a rank's own: its largest page decides, and what the
//    whole pads beyond its largest page, the rank pads too.
// 5. A rank answers for num_query_heads / tp query heads; with decode context parallelism for those
//    of the ranks that share its tokens, which must share its KV heads.
//
// Rules: vllm/config/model.py (get_num_kv_heads), vllm/distributed/utils.py (get_pp_indices),
// vllm/v1/core/kv_cache_utils.py (get_kv_cache_configs).
#pragma once

#include <cstdint>
#include <vector>

#include "base/result.h"
#include "reference/types/kv_cache_spec.h"
#include "reference/types/plan_options.h"
#include "reference/types/ranks.h"

namespace lockstep {

// The position of a rank's layer in the whole model.
struct LayerShare {
  std::int32_t layer = 0;       // of the whole plan, group by group
  std::int32_t first_head = 0;  // KV head; of states: which of the tp parts
  std::int32_t queries_per_kv = 1;
  std::int32_t first_query_head = 0;
  bool operator==(const LayerShare&) const = default;
};

struct RankPlan {
  KVCacheConfig plan;
  std::vector<LayerShare> layers;  // of the plan, group by group
};

// `queries_per_kv`: of the whole model. Refused: degrees that heads, states or layers cannot be cut
// into; a packed page that is no longer the largest.
Result<RankPlan> rank_plan(const KVCacheConfig& whole, const ParallelRank& rank,
                           std::int64_t queries_per_kv);

// The way back: the plan of the whole model in the groups, blocks and number of blocks of one that
// the planner has made for tensor parallel ranks (block sizes of hybrids depend on the cut).
// `layers`: those of the whole model. REQUIRES: the plan holds every layer (one stage).
KVCacheConfig whole_plan(const KVCacheConfig& rank, const LayerSpecs& layers, std::int32_t tp_size);

}  // namespace lockstep
