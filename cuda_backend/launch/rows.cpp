// Launchers of block tables and slots, and of what moves rows: inputs from content ids, rows into
// the cache, rows out of it.

#include "cuda_backend/kernels/block_tables.cuh"
#include "cuda_backend/kernels/cache_rows.cuh"
#include "cuda_backend/kernels/cache_write.cuh"
#include "cuda_backend/kernels/draft_slots.cuh"
#include "cuda_backend/kernels/fill_inputs.cuh"
#include "cuda_backend/kernels/packed_rows.cuh"
#include "cuda_backend/kernels/request_slots.cuh"
#include "cuda_backend/kernels/sparse_rows.cuh"
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

int launch_fill_queries(const LaunchPlace& place, const AttentionParams& params) {
  if (params.num_items == 0) return nothing_to_do();
  const auto config = job_grid(place, "fill_queries", params.num_items, params.max_query_words);
  return status_of(simt::launch(config, fill_queries_kernel, params));
}

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

// Launchers of cache writes: parts that move or have one scale go together, and so do parts with a
// scale for each token and head, and packed ones.
namespace {

enum class Writing : std::uint8_t { elements, rows, int4_rows, fp4_groups, latent_rows };
Writing writing_of(Scaling scaling) {
  switch (scaling) {
    case Scaling::per_token_head:
      return Writing::rows;
    case Scaling::int4_rows:
      return Writing::int4_rows;
    case Scaling::fp4_groups:
      return Writing::fp4_groups;
    case Scaling::latent_fp8_rows:
    case Scaling::latent_fp8_areas:
    case Scaling::latent_fp4_rows:
      return Writing::latent_rows;
    default:
      return Writing::elements;
  }
}

bool walks_in_eights(const PartWrite& part) {
  return in_eights(part.to) && aligned_to(bytes_of_eight(part.source_dtype), part.source,
                                          part.source_token_stride, part.source_head_stride, 0, 0);
}

// The parts that one launch can write: scaled alike, and walked alike (V of the x-split layout goes
// element by element, its K does not).
WritePartsParams parts_where(const WritePartsParams& params, Writing writing, bool eights) {
  WritePartsParams chosen = params;
  chosen.num_parts = 0;
  for (std::int32_t i = 0; i < params.num_parts; ++i) {
    const PartWrite& part = params.parts[i];
    if (writing_of(part.to.scaling) == writing && walks_in_eights(part) == eights)
      chosen.parts[chosen.num_parts++] = part;
  }
  return chosen;
}

template <int kItem>
int write_each_element(const LaunchPlace& place, const WritePartsParams& params) {
  std::int64_t items = 0;
  PartDivisors by;
  for (std::int32_t i = 0; i < params.num_parts; ++i) {
    const PartLayout& part = params.parts[i].to;
    by.items_per_row[i] = make_divisor(static_cast<std::uint32_t>(part.head_size / kItem));
    by.heads[i] = make_divisor(static_cast<std::uint32_t>(part.num_heads));
    items = std::max<std::int64_t>(
        items, std::int64_t{params.num_tokens} * part.num_heads * (part.head_size / kItem));
  }
  if (items >= kMaxFlatItems) return too_large();
  auto config = flat_grid(place, "write_parts", items);
  config.grid.y = static_cast<std::uint32_t>(params.num_parts);
  return status_of(simt::launch(config, write_parts_kernel<kItem>, params, by));
}

// Bytes of the accesses that the data of every group of 16 elements allows.
std::int32_t unit_of_groups(const WritePartsParams& params) {
  std::int32_t unit = 8;
  for (std::int32_t i = 0; i < params.num_parts; ++i) {
    const PartLayout& to = params.parts[i].to;
    while (!aligned_to(unit, to.base, to.block_stride, to.token_stride, to.head_stride, 0))
      unit /= 2;
  }
  return unit;
}

template <int kItem>
int write_groups(const LaunchPlace& place, const WritePartsParams& params) {
  std::int64_t items = 0;
  PartDivisors by;
  for (std::int32_t i = 0; i < params.num_parts; ++i) {
    const PartLayout& part = params.parts[i].to;
    const std::int32_t groups = part.head_size / kGroupElements;
    by.items_per_row[i] = make_divisor(static_cast<std::uint32_t>(groups));
    by.heads[i] = make_divisor(static_cast<std::uint32_t>(part.num_heads));
    items =
        std::max<std::int64_t>(items, std::int64_t{params.num_tokens} * part.num_heads * groups);
  }
  if (items >= kMaxFlatItems) return too_large();
  auto config = flat_grid(place, "write_groups", items);
  config.grid.y = static_cast<std::uint32_t>(params.num_parts);
  auto* kernel = place.defect == KernelDefect::scale_not_stored ? write_groups_kernel<kItem, false>
                                                                : write_groups_kernel<kItem, true>;
  return status_of(simt::launch(config, kernel, params, by, unit_of_groups(params)));
}

// One warp for each token, head and part.
bool grid_of_rows(simt::LaunchConfig& config, const WritePartsParams& params) {
  std::int32_t heads = 0;
  for (std::int32_t i = 0; i < params.num_parts; ++i)
    heads = std::max(heads, params.parts[i].to.num_heads);
  if (!fits_grid(params.num_tokens, heads)) return false;
  config.grid =
      dim3(static_cast<std::uint32_t>(params.num_tokens), static_cast<std::uint32_t>(heads),
           static_cast<std::uint32_t>(params.num_parts));
  config.block.x = 32;
  return true;
}

int write_int4_rows(const LaunchPlace& place, const WritePartsParams& params) {
  auto config = config_of(place, "write_int4_rows");
  if (!grid_of_rows(config, params)) return too_large();
  auto* kernel = place.defect == KernelDefect::scale_not_stored ? write_int4_rows_kernel<false>
                                                                : write_int4_rows_kernel<true>;
  return status_of(simt::launch(config, kernel, params));
}

int write_latent_rows(const LaunchPlace& place, const WritePartsParams& params) {
  auto config = config_of(place, "write_latent_rows");
  if (!fits_grid(params.num_tokens, params.num_parts)) return too_large();
  config.grid = dim3(static_cast<std::uint32_t>(params.num_tokens),
                     static_cast<std::uint32_t>(params.num_parts));
  config.block.x = 32;
  auto* kernel = place.defect == KernelDefect::scale_not_stored ? write_latent_rows_kernel<false>
                                                                : write_latent_rows_kernel<true>;
  return status_of(simt::launch(config, kernel, params));
}

template <int kItem>
int quantise_rows(const LaunchPlace& place, const WritePartsParams& params) {
  auto config = config_of(place, "quantise_rows");
  if (!grid_of_rows(config, params)) return too_large();
  auto* kernel = place.defect == KernelDefect::scale_not_stored ? quantise_rows_kernel<kItem, false>
                                                                : quantise_rows_kernel<kItem, true>;
  return status_of(simt::launch(config, kernel, params));
}

int write_parts_of(const LaunchPlace& place, const WritePartsParams& parts, Writing writing,
                   bool eights) {
  switch (writing) {
    case Writing::elements:
      return eights ? write_each_element<8>(place, parts) : write_each_element<1>(place, parts);
    case Writing::rows:
      return eights ? quantise_rows<8>(place, parts) : quantise_rows<1>(place, parts);
    case Writing::int4_rows:
      return write_int4_rows(place, parts);
    case Writing::fp4_groups:
      return eights ? write_groups<8>(place, parts) : write_groups<1>(place, parts);
    case Writing::latent_rows:
      return write_latent_rows(place, parts);
  }
  return nothing_to_do();
}

}  // namespace

int launch_write_parts(const LaunchPlace& place, const WritePartsParams& params) {
  if (params.num_tokens == 0) return nothing_to_do();
  for (const Writing writing : {Writing::elements, Writing::rows, Writing::int4_rows,
                                Writing::fp4_groups, Writing::latent_rows})
    for (const bool eights : {false, true}) {
      const WritePartsParams parts = parts_where(params, writing, eights);
      if (parts.num_parts == 0) continue;
      const int status = write_parts_of(place, parts, writing, eights);
      if (status != nothing_to_do()) return status;
    }
  return nothing_to_do();
}

// Block tables and slot mappings.

int launch_clear_rows(const LaunchPlace& place, const TableClearParams& params) {
  const std::int64_t items = std::int64_t{params.num_rows} * params.num_groups;
  if (items == 0) return nothing_to_do();
  return status_of(simt::launch(flat_grid(place, "clear_rows", items), clear_rows_kernel, params));
}

int launch_append_entries(const LaunchPlace& place, const TableAppendParams& params) {
  if (params.num_appends == 0) return nothing_to_do();
  auto config = config_of(place, "append_entries");
  config.grid.x = static_cast<std::uint32_t>(params.num_appends);
  config.block.x = std::min<std::uint32_t>(place.cta_threads, 32);
  auto* kernel = place.defect == KernelDefect::table_unsplit ? append_entries_kernel<false>
                                                             : append_entries_kernel<true>;
  return status_of(simt::launch(config, kernel, params));
}

int launch_edit_entries(const LaunchPlace& place, const TableEditParams& params) {
  if (params.num_edits == 0) return nothing_to_do();
  auto* kernel = place.defect == KernelDefect::table_unsplit ? edit_entries_kernel<false>
                                                             : edit_entries_kernel<true>;
  const auto config = flat_grid(place, "edit_entries", params.num_edits);
  return status_of(simt::launch(config, kernel, params));
}

int launch_slot_mapping(const LaunchPlace& place, const SlotMappingParams& params) {
  if (params.num_padded_tokens == 0) return nothing_to_do();
  auto config = flat_grid(place, "slot_mapping", params.num_padded_tokens);
  config.grid.y = static_cast<std::uint32_t>(params.num_groups);
  return status_of(simt::launch(config, slot_mapping_kernel, params));
}

int launch_draft_slots(const LaunchPlace& place, const DraftSlotsParams& params) {
  if (params.num_tokens == 0) return nothing_to_do();
  const auto config = flat_grid(place, "draft_slots", params.num_tokens);
  auto* kernel = place.defect == KernelDefect::draft_past_table ? draft_slots_kernel<false>
                                                                : draft_slots_kernel<true>;
  return status_of(simt::launch(config, kernel, params));
}

// Rows of HiSparse.

int launch_mirror_rows(const LaunchPlace& place, const MirrorRowsParams& params) {
  if (params.num_tokens == 0 || params.num_layers == 0) return nothing_to_do();
  if (!fits_grid(params.num_tokens, params.num_layers)) return too_large();
  auto config =
      job_grid(place, "mirror_rows", params.num_tokens, divide_up(params.max_row_bytes, 8));
  config.grid.y = static_cast<std::uint32_t>(params.num_layers);
  return status_of(simt::launch(config, mirror_rows_kernel, params));
}

int launch_clear_regions(const LaunchPlace& place, const ClearRegionsParams& params) {
  const std::int64_t items = std::int64_t{params.num_rows} * params.num_slots;
  if (items == 0) return nothing_to_do();
  if (items >= kMaxFlatItems) return too_large();
  const auto config = flat_grid(place, "clear_regions", items);
  return status_of(simt::launch(config, clear_regions_kernel, params));
}

int launch_hot_reads(const LaunchPlace& place, const HotReadParams& params) {
  if (params.num_reads == 0) return nothing_to_do();
  auto config = config_of(place, "hot_reads");
  config.grid.x = static_cast<std::uint32_t>(params.num_reads);
  config.block.x = std::min<std::uint32_t>(place.cta_threads, 32);
  auto* kernel = place.defect == KernelDefect::hot_evicts_used ? hot_reads_kernel<false>
                                                               : hot_reads_kernel<true>;
  return status_of(simt::launch(config, kernel, params));
}

int launch_swap_rows(const LaunchPlace& place, const SwapRowsParams& params) {
  if (params.num_swaps == 0 || params.num_layers == 0) return nothing_to_do();
  if (!fits_grid(params.num_swaps, params.num_layers)) return too_large();
  auto config = job_grid(place, "swap_rows", params.num_swaps, divide_up(params.max_row_bytes, 8));
  config.grid.y = static_cast<std::uint32_t>(params.num_layers);
  auto* kernel = place.defect == KernelDefect::hot_row_by_slot ? swap_rows_kernel<false>
                                                               : swap_rows_kernel<true>;
  return status_of(simt::launch(config, kernel, params));
}

// What a step's batch is made of: slots of its tokens, block tables of its requests.
int launch_request_slots(const LaunchPlace& place, const RequestSlotsParams& params) {
  if (params.num_padded_tokens == 0 || params.num_groups == 0) return nothing_to_do();
  if (!fits_grid(params.num_requests + std::int64_t{1}, params.num_groups)) return too_large();
  auto config = job_grid(place, "request_slots", params.num_requests + std::int64_t{1},
                         params.num_padded_tokens);
  config.grid.y = static_cast<std::uint32_t>(params.num_groups);
  return status_of(simt::launch(config, request_slots_kernel, params));
}

int launch_batch_tables(const LaunchPlace& place, const BatchTablesParams& params) {
  if (params.num_requests == 0 || params.num_groups == 0) return nothing_to_do();
  if (!fits_grid(params.num_requests, params.num_groups)) return too_large();
  auto config = job_grid(place, "batch_tables", params.num_requests, params.max_width);
  config.grid.y = static_cast<std::uint32_t>(params.num_groups);
  return status_of(simt::launch(config, batch_tables_kernel, params));
}

}  // namespace SIMT_VARIANT
}  // namespace lockstep::cuda
