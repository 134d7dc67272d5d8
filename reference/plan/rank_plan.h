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
#include <optional>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "reference/types/engine_config.h"
#include "reference/types/kv_cache_spec.h"
#include "reference/types/plan_options.h"

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

// The number in a layer's name that tells which layer of the model it belongs to: 3 of
// "layers.3.attn"; absent: none.
std::optional<std::int64_t> layer_number(std::string_view name);
// The first of `count` layers that is in that stage of `pp`: rule 3.
std::int64_t stage_begin(std::int64_t count, std::int64_t pp, std::int64_t stage);
// Layers that pipeline stages cut: options.num_hidden_layers, else up to the last cache.
std::int64_t num_layers(const LayerSpecs& layers, const PlanOptions& options);
// The stage of each layer. Layers without a number and draft models are in the last one.
std::vector<std::int64_t> layer_stages(const LayerSpecs& layers, const PlanOptions& options);

// Which of a request's tokens a rank of context parallelism keeps, and where
// (vllm/v1/worker/block_table.py, compute_slot_mapping).
//
// 1. The token at position p is kept by rank (p / interleave) % num_ranks, and by no other.
// 2. What a rank keeps lies in order and without gaps: its n-th token is at offset n % block_size
//    of entry n / block_size of the block table, which is the same on every rank.
//
// Not here: what the ranks exchange to attend to all tokens.

bool keeps(const ContextRank& at, std::int64_t position);
// The rank as a replicated cache sees it, which keeps all tokens.
ContextRank rank_in(const ContextRank& at, const KVCacheSpec& spec);
// How many of the first `position` tokens the rank keeps: the index among them of the token at
// `position`, where that is one of its own.
std::int64_t num_kept(const ContextRank& at, std::int64_t position);

// Number of ranks that shard the tokens of a group's blocks: 1 for states, for replicated caches,
// and for an unknown engine, which Scheduler::create refuses.
std::int32_t num_context_ranks(const EngineConfig& config, const KVCacheSpec& spec);

}  // namespace lockstep
