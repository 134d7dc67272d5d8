// Launchers for whole blocks and pages: zero, copy, poison, fingerprint, states, moves.
#include "cuda_backend/kernels/block_moves.cuh"
#include "cuda_backend/kernels/move_bytes.cuh"
#include "cuda_backend/kernels/page_fingerprint.cuh"
#include "cuda_backend/launch/launchers.h"

namespace lockstep::cuda {
namespace SIMT_VARIANT {
namespace {

// Bytes of a region that one CTA takes before a second one shares it.
constexpr std::int64_t kBytesPerCta = 64 * 1024;
constexpr std::int64_t kMoveBytesPerCta = 32 * 1024;

// x: jobs, y: regions, z: shares of a region, whose items are 16 bytes each.
simt::LaunchConfig region_grid(const LaunchPlace& place, const char* name, std::int64_t jobs,
                               std::int64_t regions, std::int64_t max_region_bytes) {
  auto config = job_grid(place, name, jobs, divide_up(max_region_bytes, 16));
  config.grid.y = static_cast<std::uint32_t>(regions);
  config.grid.z = shares_of_region(max_region_bytes, kBytesPerCta);
  return config;
}

template <class Params>
int launch_over_regions(const LaunchPlace& place, const char* name, void (*kernel)(Params),
                        const Params& params, std::int32_t num_regions) {
  if (params.num_items == 0 || num_regions == 0) return nothing_to_do();
  if (!fits_grid(params.num_items, num_regions)) return too_large();
  const auto config =
      region_grid(place, name, params.num_items, num_regions, params.max_region_bytes);
  return status_of(simt::launch(config, kernel, params));
}

}  // namespace

int launch_zero_blocks(const LaunchPlace& place, const ZeroBlocksParams& params) {
  return launch_over_regions(place, "zero_blocks", zero_blocks_kernel, params, params.max_regions);
}

int launch_copy_blocks(const LaunchPlace& place, const CopyBlocksParams& params) {
  return launch_over_regions(place, "copy_blocks", copy_blocks_kernel, params, params.max_regions);
}

int launch_poison_blocks(const LaunchPlace& place, const PoisonBlocksParams& params) {
  return launch_over_regions(place, "poison_blocks", poison_blocks_kernel, params,
                             params.num_regions);
}

int launch_fingerprint_pages(const LaunchPlace& place, const FingerprintParams& params) {
  if (params.num_items == 0) return nothing_to_do();
  auto config = config_of(place, "fingerprint_pages");
  const std::int64_t reducers = std::max<std::int64_t>(
      1, divide_up(params.max_page_bytes * kPagesAtATime, 16 * place.items_per_reducer));
  const std::int64_t threads = std::min<std::int64_t>(reducers, place.cta_threads);
  config.grid.x = static_cast<std::uint32_t>(divide_up(params.num_items, kPagesAtATime));
  config.grid.y = shares_of_region(reducers, threads);
  config.block.x =
      place.whole_warps ? in_whole_warps(threads) : static_cast<std::uint32_t>(threads);
  return status_of(simt::launch(config, page_fingerprint_kernel, params));
}

int launch_update_states(const LaunchPlace& place, const StateUpdateParams& params) {
  if (params.num_items == 0 || params.max_states == 0) return nothing_to_do();
  if (!fits_grid(params.num_items, params.max_states)) return too_large();
  auto config =
      job_grid(place, "update_states", params.num_items, divide_up(params.max_state_bytes, 8));
  config.grid.y = static_cast<std::uint32_t>(params.max_states);
  config.grid.z = shares_of_region(params.max_state_bytes, kBytesPerCta);
  return status_of(simt::launch(config, state_update_kernel, params));
}

int launch_move_bytes(const LaunchPlace& place, const MoveBytesParams& params) {
  if (params.num_moves == 0 || params.max_size_bytes == 0) return nothing_to_do();
  auto config = job_grid(place, "move_bytes", params.num_moves, params.max_size_bytes / 8);
  config.block.x = std::min<std::uint32_t>(config.block.x, kMoveThreads);
  config.grid.y = shares_of_region(params.max_size_bytes, kMoveBytesPerCta);
  return status_of(simt::launch(config, move_bytes_kernel, params));
}

}  // namespace SIMT_VARIANT
}  // namespace lockstep::cuda
