// Launchers of what moves rows: inputs from content ids, rows into the cache, rows out of it.
#include "cuda_backend/kernels/cache_rows.cuh"
#include "cuda_backend/kernels/fill_inputs.cuh"
#include "cuda_backend/launch/grid.h"
#include "cuda_backend/launch/launchers.h"

namespace lockstep::cuda {
namespace SIMT_VARIANT {

namespace {

std::int32_t widest_unit(std::int32_t bytes) {
  const std::int32_t lowest_bit = bytes & -bytes;
  return std::min(lowest_bit, 16);
}

template <class Unit>
int write_rows(const LaunchPlace& place, const WriteRowsParams& params) {
  const RowCache& cache = params.cache;
  const auto units_per_row =
      static_cast<std::uint32_t>(cache.row_bytes / std::int32_t(sizeof(Unit)));
  const bool race = place.defect == KernelDefect::write_race;
  const std::int64_t items =
      std::int64_t{params.num_tokens + (race ? 1 : 0)} * cache.num_kv_heads * units_per_row;
  if (items >= kMaxFlatItems) return too_large();
  auto* kernel = write_rows_kernel<Unit, WriteDefect::none>;
  if (race) kernel = write_rows_kernel<Unit, WriteDefect::race>;
  if (place.defect == KernelDefect::write_offset_int32)
    kernel = write_rows_kernel<Unit, WriteDefect::offset_int32>;
  return status_of(simt::launch(flat_grid(place, "write_rows", items), kernel, params,
                                make_divisor(units_per_row), make_divisor(cache.num_kv_heads)));
}

template <class Unit>
int gather_rows(const LaunchPlace& place, const GatherRowsParams& params) {
  const RowCache& cache = params.cache;
  const auto units_per_row =
      static_cast<std::uint32_t>(cache.row_bytes / std::int32_t(sizeof(Unit)));
  const std::int64_t items = std::int64_t{params.num_tokens} * cache.num_kv_heads * units_per_row;
  if (items >= kMaxFlatItems) return too_large();
  return status_of(simt::launch(flat_grid(place, "gather_rows", items), gather_rows_kernel<Unit>,
                                params, make_divisor(units_per_row),
                                make_divisor(cache.num_kv_heads)));
}

}  // namespace

int launch_fill_rows(const LaunchPlace& place, const FillRowsParams& params) {
  if (params.num_tokens == 0) return nothing_to_do();
  const bool vectors = params.row_bytes % 16 == 0;
  const std::int64_t items_per_row = divide_up(params.row_bytes, vectors ? 16 : 8);
  const std::int64_t items = std::int64_t{params.num_tokens} * params.num_kv_heads * items_per_row;
  if (items >= kMaxFlatItems) return too_large();
  auto* kernel = vectors ? fill_rows_kernel<true> : fill_rows_kernel<false>;
  return status_of(simt::launch(flat_grid(place, "fill_rows", items), kernel, params,
                                make_divisor(static_cast<std::uint32_t>(items_per_row)),
                                make_divisor(params.num_kv_heads), widest_unit(params.row_bytes)));
}

int launch_write_rows(const LaunchPlace& place, const WriteRowsParams& params) {
  if (params.num_tokens == 0) return nothing_to_do();
  switch (params.cache.unit_bytes) {
    case 16:
      return write_rows<simt::vec16>(place, params);
    case 8:
      return write_rows<std::uint64_t>(place, params);
    case 4:
      return write_rows<std::uint32_t>(place, params);
    case 2:
      return write_rows<std::uint16_t>(place, params);
    default:
      return write_rows<std::uint8_t>(place, params);
  }
}

int launch_gather_rows(const LaunchPlace& place, const GatherRowsParams& params) {
  if (params.num_tokens == 0) return nothing_to_do();
  switch (params.cache.unit_bytes) {
    case 16:
      return gather_rows<simt::vec16>(place, params);
    case 8:
      return gather_rows<std::uint64_t>(place, params);
    case 4:
      return gather_rows<std::uint32_t>(place, params);
    case 2:
      return gather_rows<std::uint16_t>(place, params);
    default:
      return gather_rows<std::uint8_t>(place, params);
  }
}

}  // namespace SIMT_VARIANT
}  // namespace lockstep::cuda
