// Launchers of what keeps a state for each request: convolutions and recurrences.
#include "cuda_backend/kernels/causal_conv1d.cuh"
#include "cuda_backend/kernels/gated_delta.cuh"
#include "cuda_backend/kernels/selective_state.cuh"
#include "cuda_backend/launch/launchers.h"

namespace lockstep::cuda {
namespace SIMT_VARIANT {
namespace {

template <int kWidth>
int convolve(const LaunchPlace& place, const ConvParams& params) {
  const std::int64_t per_thread = std::max<std::int64_t>(
      1, place.items_per_thread / (std::int64_t{kWidth} * std::max(params.max_tokens, 1)));
  auto config = config_of(place, "causal_conv1d");
  const std::int64_t threads = divide_up(params.num_channels, per_thread);
  config.block.x = static_cast<std::uint32_t>(std::min<std::int64_t>(threads, place.cta_threads));
  config.grid.x = static_cast<std::uint32_t>(params.num_items);
  config.grid.y = static_cast<std::uint32_t>(
      std::min<std::int64_t>(divide_up(threads, config.block.x), kMaxGridYZ));
  return status_of(simt::launch(config, causal_conv1d_kernel<kWidth>, params));
}

// A warp for each row of a state: up to four to a CTA where threads are cheap, one on a CPU.
simt::LaunchConfig rows_grid(const LaunchPlace& place, const char* name, std::int32_t num_items,
                             const RecurrentStates& states) {
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
simt::LaunchConfig pieces_grid(const LaunchPlace& place, const char* name, std::int32_t num_items,
                               const RecurrentStates& states) {
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

}  // namespace

int launch_causal_conv1d(const LaunchPlace& place, const ConvParams& params) {
  if (params.num_items == 0 || params.num_channels == 0) return nothing_to_do();
  switch (params.width) {
    case 2:
      return convolve<2>(place, params);
    case 3:
      return convolve<3>(place, params);
    case 4:
      return convolve<4>(place, params);
    default:
      return too_large();
  }
}

int launch_selective_state(const LaunchPlace& place, const SelectiveStateParams& params) {
  return recur(rows_grid, place, "selective_state", selective_state_kernel, params);
}

int launch_selective_chunks(const LaunchPlace& place, const SelectiveStateParams& params) {
  auto* kernel = place.defect == KernelDefect::chunk_carry_undecayed
                     ? selective_chunks_kernel<true>
                     : selective_chunks_kernel<false>;
  return recur(pieces_grid, place, "selective_chunks", kernel, params);
}

int launch_gated_delta(const LaunchPlace& place, const GatedDeltaParams& params) {
  return recur(rows_grid, place, "gated_delta", gated_delta_kernel, params);
}

int launch_delta_chunks(const LaunchPlace& place, const GatedDeltaParams& params) {
  auto* kernel = place.defect == KernelDefect::chunk_carry_undecayed ? delta_chunks_kernel<true>
                                                                     : delta_chunks_kernel<false>;
  return recur(pieces_grid, place, "delta_chunks", kernel, params);
}

}  // namespace SIMT_VARIANT
}  // namespace lockstep::cuda
