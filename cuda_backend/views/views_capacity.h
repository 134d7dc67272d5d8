// What an engine tells its users and its kernels about a plan: how many tokens it holds, how many
// rows a buffer indexed by slots has, how many requests run at once. Worked out on its own; the
// reference's figures are in reference/plan/capacity.h.
#pragma once

#include <cstdint>

#include "base/result.h"
#include "reference/types/kv_cache_spec.h"

namespace lockstep::cuda {

struct RequestLimits {
  std::int64_t max_model_len = 0;
  std::int64_t max_num_batched_tokens = 0;
  std::int64_t context_ranks = 1;  // dcp * pcp
  std::int64_t max_num_seqs = 1;
};

struct EngineCapacity {
  std::int64_t capacity_tokens = 0;
  std::int64_t slot_buffer_rows = 0;  // of a buffer with a row for each slot of any group
  std::int64_t max_num_seqs = 0;      // that will run
  std::int64_t hit_step_tokens = 0;   // hits end at its multiples; 0: none ever
};

// Refused: more requests than there are state blocks.
Result<EngineCapacity> engine_capacity(const KVCacheConfig& plan, const RequestLimits& limits);

}  // namespace lockstep::cuda
