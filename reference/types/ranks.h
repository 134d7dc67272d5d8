// One rank of context, tensor and pipeline parallelism: plain numbers. What a rank keeps of tokens
// (reference/plan/context_share.h) and of the model's cache (reference/plan/rank_plan.h) is worked
// out by the reference and by a backend, each for itself.
#pragma once

#include <cstdint>

namespace lockstep {

// A request's tokens are sharded over the ranks in runs of `interleave`.
struct ContextRank {
  std::int32_t num_ranks = 1;
  std::int32_t rank = 0;
  std::int32_t interleave = 1;  // tokens; divides the block size (cp_kv_cache_interleave_size)
  bool operator==(const ContextRank&) const = default;
};

struct ParallelRank {
  std::int32_t tp_size = 1;  // tensor_parallel_size: ranks that share the heads of a layer
  std::int32_t tp_rank = 0;
  std::int32_t pp_size = 1;  // pipeline_parallel_size: stages that share the layers
  std::int32_t pp_rank = 0;
  // decode_context_parallel_size: tensor parallel ranks that shard tokens among each other and
  // answer for the same query heads. REQUIRES: it divides tp_size.
  std::int32_t dcp_size = 1;

  // Whether the rank holds every head of every layer.
  bool is_whole() const { return tp_size == 1 && pp_size == 1; }
  bool operator==(const ParallelRank&) const = default;
};

}  // namespace lockstep
