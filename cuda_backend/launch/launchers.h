// The launchers of one build, which the tables of kernel_table.h list, and the grids that they
// share.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda_backend/kernels/engine_params.h"
#include "cuda_backend/launch/kernel_table.h"
#include "cuda_backend/simt/simt.h"

namespace lockstep::cuda {
namespace SIMT_VARIANT {

inline constexpr std::int64_t kMaxGridX = (std::int64_t{1} << 31) - 1;
inline constexpr std::int64_t kMaxGridYZ = 65535;
// Flat items are counted in 32 bits, strides included.
inline constexpr std::int64_t kMaxFlatItems = std::int64_t{1} << 31;

inline std::int64_t divide_up(std::int64_t n, std::int64_t by) { return (n + by - 1) / by; }

inline dim3 grid_of(std::int64_t x, std::int64_t y = 1, std::int64_t z = 1) {
  return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y), static_cast<unsigned>(z));
}

inline simt::LaunchConfig config_of(const LaunchPlace& place, const char* name) {
  simt::LaunchConfig config;
  config.stream = static_cast<simt::stream_t>(place.stream);
  config.name = name;
  return config;
}

inline std::uint32_t in_whole_warps(std::int64_t threads) {
  return static_cast<std::uint32_t>(divide_up(threads, 32) * 32);
}

// A grid of threads along x with items_per_thread items each.
inline simt::LaunchConfig flat_grid(const LaunchPlace& place, const char* name,
                                    std::int64_t items) {
  simt::LaunchConfig config = config_of(place, name);
  const std::int64_t threads = divide_up(items, place.items_per_thread);
  config.block.x = static_cast<std::uint32_t>(std::min<std::int64_t>(threads, place.cta_threads));
  config.grid.x = static_cast<std::uint32_t>(divide_up(threads, config.block.x));
  return config;
}

// One CTA per job along x, with threads for the job's `items`.
inline simt::LaunchConfig job_grid(const LaunchPlace& place, const char* name, std::int64_t jobs,
                                   std::int64_t items) {
  simt::LaunchConfig config = config_of(place, name);
  config.grid.x = static_cast<std::uint32_t>(jobs);
  const std::int64_t threads = std::max<std::int64_t>(1, divide_up(items, place.items_per_thread));
  config.block.x = static_cast<std::uint32_t>(std::min<std::int64_t>(threads, place.cta_threads));
  return config;
}

// Number of CTAs along one axis that share the `units` of a region.
inline std::uint32_t shares_of_region(std::int64_t units, std::int64_t units_per_cta) {
  return static_cast<std::uint32_t>(std::clamp<std::int64_t>(units / units_per_cta, 1, kMaxGridYZ));
}

inline bool fits_grid(std::int64_t x, std::int64_t y) {
  return x >= 0 && x <= kMaxGridX && y >= 0 && y <= kMaxGridYZ;
}

inline int status_of(simt::error_t error) { return static_cast<int>(error); }
inline int nothing_to_do() { return status_of(simt::success); }
inline int too_large() { return status_of(simt::invalid_configuration); }

// True if the address and all strides are multiples of `bytes`.
inline bool aligned_to(std::int64_t bytes, const void* address, std::int64_t a, std::int64_t b,
                       std::int64_t c = 0, std::int64_t d = 0) {
  const auto at = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(address));
  return (at | a | b | c | d) % bytes == 0;
}
inline std::int64_t bytes_of_eight(DType dtype) { return itemsize_bytes(dtype) == 1 ? 8 : 16; }
inline std::int64_t row_bytes_of(const PartLayout& part) {
  return std::int64_t{part.head_size} * itemsize_bytes(part.dtype);
}
inline bool in_eights(const PartLayout& part) {
  if (part.scaling >= kFirstLatent) return part.head_size % 8 == 0;  // byte by byte
  if (part.scaling >= kFirstPacked)                                  // four bytes
    return part.head_size % 8 == 0 &&
           aligned_to(4, part.base, part.block_stride, part.token_stride, part.head_stride);
  const bool whole = part.piece_elements >= part.head_size;
  return part.head_size % 8 == 0 && (whole || part.piece_elements % 8 == 0) &&
         aligned_to(bytes_of_eight(part.dtype), part.base, part.block_stride, part.token_stride,
                    part.head_stride, whole ? 0 : part.piece_stride);
}

// launch_clear_rows(), ...
#define LOCKSTEP_DECLARE_LAUNCHER(name, Params) \
  int launch_##name(const LaunchPlace& place, const Params& params);
LOCKSTEP_PROTOCOL_KERNELS(LOCKSTEP_DECLARE_LAUNCHER)
LOCKSTEP_ENGINE_KERNELS(LOCKSTEP_DECLARE_LAUNCHER)
#undef LOCKSTEP_DECLARE_LAUNCHER

}  // namespace SIMT_VARIANT
}  // namespace lockstep::cuda
