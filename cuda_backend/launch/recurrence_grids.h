// Grids of the recurrences, for every launcher of a kernel that carries rows of a state.
#pragma once

#include <algorithm>

#include "cuda_backend/kernels/state_rows.cuh"
#include "cuda_backend/launch/launchers.h"

namespace lockstep::cuda {
namespace SIMT_VARIANT {

// A warp for each row of a state: up to four to a CTA where threads are cheap, one on a CPU.
inline simt::LaunchConfig rows_grid(const LaunchPlace& place, const char* name,
                                    std::int32_t num_items, const RecurrentStates& states) {
  auto config = config_of(place, name);
  const std::int64_t warps =
      std::clamp<std::int64_t>(std::min<std::int64_t>(place.cta_threads / 32, states.rows), 1, 4);
  config.grid =
      dim3(static_cast<std::uint32_t>(num_items), static_cast<std::uint32_t>(states.num_heads),
           place.whole_warps ? shares_of_region(states.rows, warps) : 1);
  config.block.x = static_cast<std::uint32_t>(32 * warps);
  return config;
}
// The same where a warp carries several rows from piece to piece, and no loop takes it to others.
inline simt::LaunchConfig pieces_grid(const LaunchPlace& place, const char* name,
                                      std::int32_t num_items, const RecurrentStates& states) {
  auto config = rows_grid(place, name, num_items, states);
  const std::int64_t rows_of_cta = config.block.x / 32 * std::int64_t{kRowsOfWarp};
  config.grid.z = static_cast<std::uint32_t>(divide_up(states.rows, rows_of_cta));
  return config;
}

template <class Params>
int recur(decltype(rows_grid)* grid, const LaunchPlace& place, const char* name,
          void (*kernel)(Params), const Params& params) {
  if (params.num_items == 0 || params.states.rows == 0) return nothing_to_do();
  if (!fits_grid(params.num_items, params.states.num_heads) ||
      params.states.columns > kMaxStateColumns)
    return too_large();
  return status_of(
      simt::launch(grid(place, name, params.num_items, params.states), kernel, params));
}

}  // namespace SIMT_VARIANT
}  // namespace lockstep::cuda
