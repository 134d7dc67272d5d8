// The grid of the recurrences, for every launcher of a kernel that carries rows of a state.
#pragma once

#include <algorithm>

#include "cuda_backend/kernels/state_rows.cuh"
#include "cuda_backend/launch/launchers.h"

namespace lockstep::cuda {
namespace SIMT_VARIANT {

// A warp for every kRowsOfWarp rows of a state: up to four to a CTA where threads are cheap, one on
// a CPU. `narrow` and `wide` have 4 and 8 columns to a lane.
template <class Params>
int recur(const LaunchPlace& place, const char* name, void (*narrow)(Params), void (*wide)(Params),
          const Params& params) {
  const RecurrentStates& states = params.states;
  if (params.num_items == 0 || states.rows == 0) return nothing_to_do();
  const std::int64_t all_warps = divide_up(states.rows, kRowsOfWarp);
  const std::int64_t warps =
      std::clamp<std::int64_t>(std::min<std::int64_t>(place.cta_threads / 32, all_warps), 1, 4);
  if (!fits_grid(params.num_items, states.num_heads) || states.columns > kMaxStateColumns ||
      itemsize_bytes(states.dtype) < 2 || divide_up(all_warps, warps) > kMaxGridYZ)
    return too_large();
  auto config = config_of(place, name);
  config.grid = grid_of(params.num_items, states.num_heads, divide_up(all_warps, warps));
  config.block.x = static_cast<std::uint32_t>(32 * warps);
  return status_of(simt::launch(config, states.columns <= 128 ? narrow : wide, params));
}

}  // namespace SIMT_VARIANT
}  // namespace lockstep::cuda
