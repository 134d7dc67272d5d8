// Mistakes of real engines in the figures of views/views_capacity.h, each switchable by name: other
// limits or another plan going in, other figures coming out.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "base/result.h"
#include "cuda_backend/views/views_capacity.h"

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

// As engine_capacity() of an engine with the defect.
Result<EngineCapacity> planted_capacity(const KVCacheConfig& plan, const RequestLimits& limits,
                                        CapacityDefect defect);

}  // namespace lockstep::cuda
