// What an engine tells its users and its kernels about a plan: how many tokens it holds, how many
// rows a buffer indexed by slots has, how many requests run at once. Worked out on its own, with
// the mistakes that engines made as switches; the model's figures are in reference/plan/capacity.h.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "base/result.h"
#include "reference/types/kv_cache_spec.h"

namespace lockstep::cuda {

enum class CapacityDefect : std::uint8_t {
  none,
  capacity_all_groups,  // vLLM 40384: groups of O(1) cost divide the capacity
  capacity_sliding,     // 40417: windows and chunks divide it
  routed_buffer,        // 37118: a slot-indexed buffer sized by the capacity
  state_blocks_capped,  // 38270: max_num_seqs lowered in silence to what the states allow
  cp_memory,            // 39949 review: ranks that share a context left out of the estimate
  hit_rate_pack,        // 35703: a pack's page taken for a longer block, which hits must fill
};
std::string_view name_of(CapacityDefect defect);
std::optional<CapacityDefect> capacity_defect_from_name(std::string_view name);

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
Result<EngineCapacity> engine_capacity(const KVCacheConfig& plan, const RequestLimits& limits,
                                       CapacityDefect defect = CapacityDefect::none);

}  // namespace lockstep::cuda
