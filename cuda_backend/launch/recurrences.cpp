// Launchers for kernels with a state per request: convolutions and recurrences.
#include "cuda_backend/kernels/causal_conv1d.cuh"
#include "cuda_backend/kernels/gated_delta.cuh"
#include "cuda_backend/kernels/selective_state.cuh"
#include "cuda_backend/launch/recurrence_grids.h"

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
  return recur(pieces_grid, place, "selective_chunks", selective_chunks_kernel, params);
}

int launch_gated_delta(const LaunchPlace& place, const GatedDeltaParams& params) {
  return recur(rows_grid, place, "gated_delta", gated_delta_kernel, params);
}

int launch_delta_chunks(const LaunchPlace& place, const GatedDeltaParams& params) {
  return recur(pieces_grid, place, "delta_chunks", delta_chunks_kernel, params);
}

}  // namespace SIMT_VARIANT
}  // namespace lockstep::cuda
