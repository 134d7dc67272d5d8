// Launchers of moves: bytes, and pages between caches.
#include "cuda_backend/kernels/copy_pages.cuh"
#include "cuda_backend/kernels/move_bytes.cuh"
#include "cuda_backend/launch/engine_launchers.h"
#include "cuda_backend/launch/grid.h"

namespace lockstep::cuda {
namespace SIMT_VARIANT {

namespace {

// Bytes that one CTA takes before a second one shares them.
constexpr std::int64_t kMoveBytesPerCta = 32 * 1024;

}  // namespace

int launch_move_bytes(const LaunchPlace& place, const MoveBytesParams& params) {
  if (params.num_moves == 0 || params.max_size_bytes == 0) return nothing_to_do();
  auto config = job_grid(place, "move_bytes", params.num_moves, params.max_size_bytes / 8);
  config.block.x = std::min<std::uint32_t>(config.block.x, kMoveThreads);
  config.grid.y = shares_of_region(params.max_size_bytes, kMoveBytesPerCta);
  auto* kernel =
      place.defect == KernelDefect::shift_race ? move_bytes_kernel<true> : move_bytes_kernel<false>;
  return status_of(simt::launch(config, kernel, params));
}

int launch_copy_pages(const LaunchPlace& place, const CopyPagesParams& params) {
  if (params.num_pairs == 0 || params.num_regions == 0) return nothing_to_do();
  if (!fits_grid(params.num_pairs, params.num_regions)) return too_large();
  auto config =
      job_grid(place, "copy_pages", params.num_pairs, divide_up(params.max_region_bytes, 16));
  config.grid.y = static_cast<std::uint32_t>(params.num_regions);
  config.grid.z = shares_of_region(params.max_region_bytes, kMoveBytesPerCta);
  return status_of(simt::launch(config, copy_pages_kernel, params));
}

}  // namespace SIMT_VARIANT
}  // namespace lockstep::cuda
