// The launchers of all kernels, and at the end the tables that list them.
#include "cuda_backend/launch/launchers.h"

#include "cuda_backend/kernels/block_moves.cuh"
#include "cuda_backend/kernels/block_tables.cuh"
#include "cuda_backend/kernels/cache_write.cuh"
#include "cuda_backend/kernels/causal_conv1d.cuh"
#include "cuda_backend/kernels/digests.cuh"
#include "cuda_backend/kernels/gated_delta.cuh"
#include "cuda_backend/kernels/packed_rows.cuh"
#include "cuda_backend/kernels/selective_state.cuh"
#include "cuda_backend/kernels/sparse_rows.cuh"
#include "cuda_backend/kernels/split_attention.cuh"
#include "cuda_backend/launch/recurrence_grids.h"

namespace lockstep::cuda {
namespace SIMT_VARIANT {
namespace {

const char* error_text(int error) { return simt::error_string(static_cast<simt::error_t>(error)); }

std::int32_t widest_unit(std::int32_t bytes) {
  const std::int32_t lowest_bit = bytes & -bytes;
  return std::min(lowest_bit, 16);
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

// Parts of one shape.
template <class Unit>
int move_rows(const LaunchPlace& place, const WritePartsParams& params) {
  const PartLayout& part = params.parts[0].to;
  const auto units_per_row =
      static_cast<std::uint32_t>(row_bytes_of(part) / std::int64_t(sizeof(Unit)));
  const std::int64_t items = std::int64_t{params.num_rows} * part.num_heads * units_per_row;
  if (items >= kMaxFlatItems) return too_large();
  return status_of(simt::launch(flat_grid(place, "write_rows", items), move_rows_kernel<Unit>,
                                params, make_divisor(units_per_row),
                                make_divisor(static_cast<std::uint32_t>(part.num_heads))));
}

#if KERNELS_HAVE_WIDE_WORDS
// The widest unit of a move. An array of vec16 would lose its attribute: rows have other types.
struct [[gnu::may_alias]] CacheLine {
  simt::vec16 quarters[4];
};
#endif

// with_unit() of words.cuh for the host: nvcc allows no function that calls lambdas of both sides.
template <class F>
int for_unit(std::int64_t unit_bytes, const F& f) {
  if (unit_bytes == 16) return f(simt::vec16{});
  if (unit_bytes == 8) return f(std::uint64_t{});
  if (unit_bytes == 4) return f(std::uint32_t{});
  if (unit_bytes == 2) return f(std::uint16_t{});
  return f(std::uint8_t{});
}

}  // namespace

int launch_fill_rows(const LaunchPlace& place, const FillRowsParams& params) {
  if (params.num_rows == 0) return nothing_to_do();
  const bool vectors = params.row_bytes % 16 == 0;
  const std::int64_t items_per_row = divide_up(params.row_bytes, vectors ? 16 : 8);
  const std::int64_t items = std::int64_t{params.num_rows} * params.num_kv_heads * items_per_row;
  if (items >= kMaxFlatItems) return too_large();
  auto* kernel = vectors ? fill_rows_kernel<16> : fill_rows_kernel<8>;
  bool whole = false;
#if KERNELS_HAVE_WIDE_WORDS
  whole = params.row_bytes % 64 == 0 && has_wide_words();
  if (whole) kernel = fill_rows_kernel<0>;
#endif
  return status_of(simt::launch(flat_grid(place, "fill_rows", items), kernel, params,
                                make_divisor(static_cast<std::uint32_t>(whole ? 1 : items_per_row)),
                                make_divisor(params.num_kv_heads), widest_unit(params.row_bytes)));
}

int launch_gather_rows(const LaunchPlace& place, const GatherRowsParams& params) {
  if (params.num_tokens == 0) return nothing_to_do();
  return for_unit(params.cache.unit_bytes,
                  [&](auto unit) { return gather_rows<decltype(unit)>(place, params); });
}

// Launchers of cache writes. One launch writes parts that need the same kernel: parts that are
// moved in one shape, parts with one scale, parts with a scale per token and head, packed parts.
namespace {

// What one launch does for a part.
struct WriteShape {
  Scaling scaling = Scaling::none;
  bool in_pieces = false;       // rows of the x-split layout
  std::int64_t unit_bytes = 0;  // moves: widest access that both sides allow
  bool eights = false;          // others: eight elements at a time
  bool short_rows = false;      // others: of at most 128 elements
  std::int64_t row_bytes = 0;   // moves
  std::int32_t num_heads = 0;   // moves
  bool operator==(const WriteShape&) const = default;
};
WriteShape shape_of(const PartWrite& part) {
  const PartLayout& to = part.to;
  WriteShape shape{
      .scaling = to.scaling,
      .in_pieces = to.scaling < Scaling::per_token_head && to.piece_elements < to.head_size};
  if (shape.in_pieces || to.scaling != Scaling::none) {
    // Eight elements of a row in pieces of one are loaded at once, whatever their addresses.
    shape.eights = (in_eights(to) || (to.piece_elements == 1 && to.head_size % 8 == 0)) &&
                   aligned_to(bytes_of_eight(part.source_dtype), part.source,
                              part.source_row_stride, part.source_head_stride);
    shape.short_rows = to.head_size <= 128;
    return shape;
  }
  shape.row_bytes = row_bytes_of(to);
  shape.num_heads = to.num_heads;
  shape.unit_bytes = 16;
  while (
      !aligned_to(shape.unit_bytes, to.base, to.block_stride, to.token_stride, to.head_stride,
                  shape.row_bytes) ||
      !aligned_to(shape.unit_bytes, part.source, part.source_row_stride, part.source_head_stride))
    shape.unit_bytes /= 2;
  return shape;
}

// True if every part's numbers are bf16 (and are stored as `to`).
bool are_from_bf16(const WritePartsParams& params) {
  for (std::int32_t i = 0; i < params.num_parts; ++i)
    if (params.parts[i].source_dtype != DType::bf16) return false;
  return true;
}
bool are_from_bf16_to(const WritePartsParams& params, DType to) {
  for (std::int32_t i = 0; i < params.num_parts; ++i)
    if (params.parts[i].to.dtype != to) return false;
  return are_from_bf16(params);
}

// A grid over (`rows` source rows, head, item) along x and parts along y. A row has
// head_size / item_elements items, or items_per_row. Sets `by` to the divisors of an item's
// number; false: too large.
bool grid_of_items(simt::LaunchConfig& config, PartDivisors& by, const LaunchPlace& place,
                   const char* name, const WritePartsParams& params, std::int64_t rows,
                   std::int32_t item_elements, std::int32_t items_per_row = 0) {
  std::int64_t items = 0;
  for (std::int32_t i = 0; i < params.num_parts; ++i) {
    const PartLayout& part = params.parts[i].to;
    const std::int32_t of_row = items_per_row > 0 ? items_per_row : part.head_size / item_elements;
    by.items_per_row[i] = make_divisor(static_cast<std::uint32_t>(of_row));
    by.heads[i] = make_divisor(static_cast<std::uint32_t>(part.num_heads));
    items = std::max<std::int64_t>(items, rows * part.num_heads * of_row);
  }
  if (items >= kMaxFlatItems) return false;
  config = flat_grid(place, name, items);
  config.grid.y = static_cast<std::uint32_t>(params.num_parts);
  return true;
}

template <int kItem, bool kAcross>
int write_each_element(const LaunchPlace& place, const WritePartsParams& params) {
  simt::LaunchConfig config;
  PartDivisors by;
  const std::int64_t rows =
      kAcross ? divide_up(params.num_rows, kTokensAcross) * kTokensAcross : params.num_rows;
  if (!grid_of_items(config, by, place, "write_parts", params, rows, kItem)) return too_large();
  constexpr int kBf16 = int(DType::bf16), kE4m3 = int(DType::fp8_e4m3);
  auto* kernel = write_parts_kernel<kItem, kAny, kAny, kAcross>;
  if constexpr (kItem == 8) {
    if (are_from_bf16_to(params, DType::fp8_e4m3))
      kernel = write_parts_kernel<kItem, kBf16, kE4m3, kAcross>;
    if (kAcross && are_from_bf16_to(params, DType::bf16))
      kernel = write_parts_kernel<kItem, kBf16, kBf16, kAcross>;
  }
  return status_of(simt::launch(config, kernel, params, by));
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
  simt::LaunchConfig config;
  PartDivisors by;
  if (!grid_of_items(config, by, place, "write_groups", params, params.num_rows, kGroupElements))
    return too_large();
  auto* kernel = write_groups_kernel<kItem, kAny>;
  if constexpr (kItem == 8)
    if (are_from_bf16(params)) kernel = write_groups_kernel<kItem, int(DType::bf16)>;
  return status_of(simt::launch(config, kernel, params, by, unit_of_groups(params)));
}

// Lanes that share a row: a warp, or half of one where rows are short. A CPU's thread that runs a
// whole warp has a row of its own.
constexpr int kWarp = 32 / simt::kLanesPerThread, kHalf = kWarp > 1 ? 16 : 1;

// A grid of whole warps whose lanes share rows.
bool grid_of_rows(simt::LaunchConfig& config, PartDivisors& by, const LaunchPlace& place,
                  const char* name, const WritePartsParams& params, std::int32_t lanes) {
  LaunchPlace one_each = place;
  one_each.items_per_thread = 1;
  one_each.cta_threads = place.whole_warps ? std::max(place.cta_threads / 32 * 32, 32u) : 32;
  if (!grid_of_items(config, by, one_each, name, params, params.num_rows, 1, lanes)) return false;
  config.block.x = in_whole_warps(config.block.x);
  return true;
}

int write_int4_rows(const LaunchPlace& place, const WritePartsParams& params,
                    const WriteShape& shape) {
  simt::LaunchConfig config;
  PartDivisors by;
  const bool eights = shape.eights && are_from_bf16(params);
  const bool halves = eights && shape.short_rows;
  if (!grid_of_rows(config, by, place, "write_int4_rows", params, halves ? kHalf : kWarp))
    return too_large();
  auto* kernel = halves   ? write_int4_rows_kernel<kHalf, 8, true>
                 : eights ? write_int4_rows_kernel<kWarp, 8, true>
                          : write_int4_rows_kernel<kWarp, 2, false>;
  return status_of(simt::launch(config, kernel, params, by));
}

template <Scaling kScaling>
int write_latent_rows(const LaunchPlace& place, const WritePartsParams& params, bool eights) {
  auto config = config_of(place, "write_latent_rows");
  if (!fits_grid(params.num_rows, params.num_parts)) return too_large();
  config.grid = grid_of(params.num_rows, params.num_parts);
  config.block.x = 32;
  auto* kernel = eights && are_from_bf16(params) ? write_latent_rows_kernel<kScaling, true>
                                                 : write_latent_rows_kernel<kScaling, false>;
  return status_of(simt::launch(config, kernel, params));
}

int quantise_rows(const LaunchPlace& place, const WritePartsParams& params,
                  const WriteShape& shape) {
  simt::LaunchConfig config;
  PartDivisors by;
  constexpr int kBf16 = int(DType::bf16);
  const bool halves = shape.eights && shape.short_rows;
  if (!grid_of_rows(config, by, place, "quantise_rows", params, halves ? kHalf : kWarp))
    return too_large();
  auto* kernel = halves         ? quantise_rows_kernel<kHalf, 8, kAny, kAny>
                 : shape.eights ? quantise_rows_kernel<kWarp, 8, kAny, kAny>
                                : quantise_rows_kernel<kWarp, 1, kAny, kAny>;
  if (halves && are_from_bf16_to(params, DType::int8))
    kernel = quantise_rows_kernel<kHalf, 8, kBf16, int(DType::int8)>;
  if (halves && are_from_bf16_to(params, DType::fp8_e4m3))
    kernel = quantise_rows_kernel<kHalf, 8, kBf16, int(DType::fp8_e4m3)>;
  return status_of(simt::launch(config, kernel, params, by));
}

int write_parts_of(const LaunchPlace& place, const WritePartsParams& parts,
                   const WriteShape& shape) {
  switch (shape.scaling) {
    case Scaling::none:
      if (!shape.in_pieces) {
#if KERNELS_HAVE_WIDE_WORDS
        if (shape.unit_bytes == 16 && shape.row_bytes % 64 == 0)
          return move_rows<CacheLine>(place, parts);
#endif
        return for_unit(shape.unit_bytes,
                        [&](auto unit) { return move_rows<decltype(unit)>(place, parts); });
      }
      [[fallthrough]];
    case Scaling::per_tensor:
      if (shape.in_pieces)
        return shape.eights ? write_each_element<8, true>(place, parts)
                            : write_each_element<1, true>(place, parts);
      return shape.eights ? write_each_element<8, false>(place, parts)
                          : write_each_element<1, false>(place, parts);
    case Scaling::per_token_head:
      return quantise_rows(place, parts, shape);
    case Scaling::int4_rows:
      return write_int4_rows(place, parts, shape);
    case Scaling::fp4_groups:
      return shape.eights ? write_groups<8>(place, parts) : write_groups<1>(place, parts);
    case Scaling::latent_fp8_rows:
      return write_latent_rows<Scaling::latent_fp8_rows>(place, parts, shape.eights);
    case Scaling::latent_fp8_areas:
      return write_latent_rows<Scaling::latent_fp8_areas>(place, parts, shape.eights);
    case Scaling::latent_fp4_rows:
      return write_latent_rows<Scaling::latent_fp4_rows>(place, parts, shape.eights);
  }
  return nothing_to_do();
}

}  // namespace

int launch_write_parts(const LaunchPlace& place, const WritePartsParams& params) {
  if (params.num_rows == 0) return nothing_to_do();
  std::uint32_t written = 0;  // bit i: part i
  for (std::int32_t first = 0; first < params.num_parts; ++first) {
    if ((written >> first & 1) != 0) continue;
    const WriteShape shape = shape_of(params.parts[first]);
    WritePartsParams parts = params;
    parts.num_parts = 0;
    for (std::int32_t i = first; i < params.num_parts; ++i) {
      if (shape_of(params.parts[i]) != shape) continue;
      parts.parts[parts.num_parts++] = params.parts[i];
      written |= 1u << i;
    }
    const int status = write_parts_of(place, parts, shape);
    if (status != nothing_to_do()) return status;
  }
  return nothing_to_do();
}

// Block tables, slot mappings and rows of host pages.

namespace {

// A grid over items along x and `rows` of them along y.
template <class Params>
int over_items(const LaunchPlace& place, const char* name, void (*kernel)(Params),
               const Params& params, std::int64_t items, std::int32_t rows = 1) {
  if (items == 0) return nothing_to_do();
  if (items >= kMaxFlatItems) return too_large();
  auto config = flat_grid(place, name, items);
  config.grid.y = static_cast<std::uint32_t>(rows);
  return status_of(simt::launch(config, kernel, params));
}

// A CTA for each job along x in each of `rows` along y, `shares` of them along z; its threads share
// the job's `items`.
template <class Params>
int over_jobs(const LaunchPlace& place, const char* name, void (*kernel)(Params),
              const Params& params, std::int64_t jobs, std::int32_t rows, std::int64_t items,
              std::uint32_t shares = 1) {
  if (jobs == 0 || rows == 0) return nothing_to_do();
  if (!fits_grid(jobs, rows)) return too_large();
  auto config = job_grid(place, name, jobs, items);
  config.grid.y = static_cast<std::uint32_t>(rows);
  config.grid.z = shares;
  return status_of(simt::launch(config, kernel, params));
}

}  // namespace

int launch_clear_rows(const LaunchPlace& place, const TableClearParams& params) {
  return over_items(place, "clear_rows", clear_rows_kernel, params,
                    std::int64_t{params.num_rows} * params.num_groups);
}

int launch_edit_entries(const LaunchPlace& place, const TableEditParams& params) {
  return over_items(place, "edit_entries", edit_entries_kernel, params, params.num_edits);
}

int launch_slot_mapping(const LaunchPlace& place, const SlotMappingParams& params) {
  return over_items(place, "slot_mapping", slot_mapping_kernel, params, params.num_padded_tokens,
                    params.num_groups);
}

int launch_draft_slots(const LaunchPlace& place, const DraftSlotsParams& params) {
  return over_items(place, "draft_slots", draft_slots_kernel, params, params.num_tokens);
}

int launch_clear_regions(const LaunchPlace& place, const ClearRegionsParams& params) {
  return over_items(place, "clear_regions", clear_regions_kernel, params,
                    std::int64_t{params.num_rows} * params.num_slots);
}

int launch_mirror_rows(const LaunchPlace& place, const MirrorRowsParams& params) {
  return over_jobs(place, "mirror_rows", mirror_rows_kernel, params, params.num_tokens,
                   params.num_layers, divide_up(params.max_row_bytes, 8));
}

int launch_swap_rows(const LaunchPlace& place, const SwapRowsParams& params) {
  return over_jobs(place, "swap_rows", swap_rows_kernel, params, params.num_swaps,
                   params.num_layers, divide_up(params.max_row_bytes, 8));
}

int launch_append_entries(const LaunchPlace& place, const TableAppendParams& params) {
  if (params.num_appends == 0) return nothing_to_do();
  auto config = config_of(place, "append_entries");
  config.grid.x = static_cast<std::uint32_t>(params.num_appends);
  config.block.x = std::min<std::uint32_t>(place.cta_threads, 32);
  return status_of(simt::launch(config, append_entries_kernel, params));
}

int launch_hot_reads(const LaunchPlace& place, const HotReadParams& params) {
  if (params.num_reads == 0) return nothing_to_do();
  auto config = config_of(place, "hot_reads");
  config.grid.x = static_cast<std::uint32_t>(params.num_reads);
  config.block.x = 32;
  return status_of(simt::launch(config, hot_reads_kernel, params));
}

// Launchers for reads of the cache through block tables: digests and softmax attention.

int launch_attention_digest(const LaunchPlace& place, const DigestParams& params) {
  if (params.num_pieces == 0) return nothing_to_do();
  auto config = config_of(place, "attention_digest");
  config.grid.x = static_cast<std::uint32_t>(params.num_pieces);
  const std::int64_t threads = std::clamp<std::int64_t>(
      params.max_positions / place.items_per_reducer, 1, place.cta_threads);
  config.block.x =
      place.whole_warps ? in_whole_warps(threads) : static_cast<std::uint32_t>(threads);
  return status_of(simt::launch(config, attention_digest_kernel, params));
}

namespace {

template <class Shape>
int split_attention(const LaunchPlace& place, const SplitAttentionParams& params) {
  const std::int64_t queries_per_kv = params.num_query_heads / params.key.num_heads;
  auto config = config_of(place, "split_attention");
  config.grid =
      grid_of(params.num_tokens, params.key.num_heads * divide_up(queries_per_kv, Shape::kHeads),
              std::max(params.num_splits, 1));
  config.block.x = 32 / simt::kLanesPerThread;
  return status_of(simt::launch(config, split_attention_kernel<Shape>, params));
}

int split_attention_of(const LaunchPlace& place, const SplitAttentionParams& params) {
  const PartLayout &key = params.key, &value = params.value;
  if (!in_eights(key) || !in_eights(value))
    return split_attention<AttentionShape<1, 32, kAny, 1>>(place, params);
  const bool plain = key.scaling < kFirstPacked && key.dtype == value.dtype;
  const bool is_bf16 = plain && key.dtype == DType::bf16;
  using Short = AttentionShape<8, 1, int(DType::bf16), 4>;
  using ShortE4m3 = AttentionShape<8, 1, int(DType::fp8_e4m3), 4>;
  using Latent = AttentionShape<8, 2, int(DType::bf16), 4>;
  if (key.head_size <= Short::kKeySize && value.head_size <= Short::kValueSize) {
#if KERNELS_HAVE_WIDE_WORDS
    // The plain build for CPUs computes no heads that are not there.
    using Single = AttentionShape<8, 1, int(DType::bf16), 1>;
    if (is_bf16 && params.num_query_heads == key.num_heads)
      return split_attention<Single>(place, params);
#endif
    if (is_bf16) return split_attention<Short>(place, params);
    if (plain && key.dtype == DType::fp8_e4m3) return split_attention<ShortE4m3>(place, params);
  }
  if (is_bf16 && key.head_size <= Latent::kKeySize && value.head_size <= Latent::kValueSize)
    return split_attention<Latent>(place, params);
  return split_attention<AttentionShape<8, 4, kAny, 1>>(place, params);
}

}  // namespace

// The splits, then, where a query may have several, the kernel that joins them.
int launch_split_attention(const LaunchPlace& place, const SplitAttentionParams& params) {
  if (params.num_tokens == 0) return nothing_to_do();
  if (!fits_grid(params.num_tokens, params.num_query_heads) || params.num_splits > kMaxGridYZ ||
      params.key.head_size > kMaxHeadSize || params.value.head_size > kMaxHeadSize)
    return too_large();
  const int status = split_attention_of(place, params);
  if (status != nothing_to_do() || params.num_splits <= 1) return status;
  auto config = config_of(place, "attention_combine");
  config.grid = grid_of(params.num_tokens, params.num_query_heads);
  config.block.x = static_cast<std::uint32_t>(
      std::clamp<std::int64_t>(divide_up(params.value.head_size, place.items_per_thread), 1, 128));
  return status_of(simt::launch(config, attention_combine_kernel, params));
}

// Launchers for whole blocks and pages: zero, copy, poison, fingerprint, states, moves.
namespace {

// Bytes of a region that one CTA takes before a second one shares it.
constexpr std::int64_t kBytesPerCta = 64 * 1024;
constexpr std::int64_t kMoveBytesPerCta = 32 * 1024;

// x: items, y: regions, z: shares of a region, whose items are 16 bytes each.
template <class Params>
int over_regions(const LaunchPlace& place, const char* name, void (*kernel)(Params),
                 const Params& params, std::int32_t num_regions) {
  return over_jobs(place, name, kernel, params, params.num_items, num_regions,
                   divide_up(params.max_region_bytes, 16),
                   shares_of_region(params.max_region_bytes, kBytesPerCta));
}

}  // namespace

int launch_zero_blocks(const LaunchPlace& place, const ZeroBlocksParams& params) {
  return over_regions(place, "zero_blocks", zero_blocks_kernel, params, params.max_regions);
}

int launch_copy_blocks(const LaunchPlace& place, const CopyBlocksParams& params) {
  return over_regions(place, "copy_blocks", copy_blocks_kernel, params, params.max_regions);
}

int launch_poison_blocks(const LaunchPlace& place, const PoisonBlocksParams& params) {
  return over_regions(place, "poison_blocks", poison_blocks_kernel, params, params.num_regions);
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
  // A CPU's CTA has one thread, which takes words in runs.
  if (KERNELS_HAVE_WIDE_WORDS) {
    config.grid.y = shares_of_region(params.max_page_bytes, kBytesPerCta);
    config.block.x = 1;
  }
  return status_of(simt::launch(config, page_fingerprint_kernel, params));
}

int launch_update_states(const LaunchPlace& place, const StateUpdateParams& params) {
  return over_jobs(place, "update_states", state_update_kernel, params, params.num_items,
                   params.max_states, divide_up(params.max_state_bytes, 8),
                   shares_of_region(params.max_state_bytes, kBytesPerCta));
}

int launch_move_bytes(const LaunchPlace& place, const MoveBytesParams& params) {
  if (params.num_moves == 0 || params.max_size_bytes == 0) return nothing_to_do();
  auto config = job_grid(place, "move_bytes", params.num_moves, params.max_size_bytes / 8);
  config.block.x = std::min<std::uint32_t>(config.block.x, kMoveThreads);
  config.grid.y = shares_of_region(params.max_size_bytes, kMoveBytesPerCta);
  return status_of(simt::launch(config, move_bytes_kernel, params));
}

// Launchers for kernels with a state per request: convolutions and recurrences.
namespace {

template <int kWidth>
int convolve(const LaunchPlace& place, const ConvParams& params) {
  const std::int64_t per_thread = std::max<std::int64_t>(
      1, place.items_per_thread / (std::int64_t{kWidth} * std::max(params.max_tokens, 1)));
  auto config = config_of(place, "causal_conv1d");
  const std::int64_t threads = divide_up(params.num_channels, per_thread);
  config.block.x = static_cast<std::uint32_t>(std::min<std::int64_t>(threads, place.cta_threads));
  const std::int64_t segments = divide_up(std::max(params.max_tokens, 1), kConvTokens);
  if (segments > kMaxGridYZ) return too_large();
  config.grid =
      grid_of(params.num_items, std::min(divide_up(threads, config.block.x), kMaxGridYZ), segments);
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
  return recur(place, "selective_state", selective_state_kernel<4>, selective_state_kernel<8>,
               params);
}

int launch_selective_chunks(const LaunchPlace& place, const SelectiveStateParams& params) {
  return recur(place, "selective_chunks", selective_chunks_kernel<4>, selective_chunks_kernel<8>,
               params);
}

int launch_gated_delta(const LaunchPlace& place, const GatedDeltaParams& params) {
  return recur(place, "gated_delta", gated_delta_kernel<4>, gated_delta_kernel<8>, params);
}

int launch_delta_chunks(const LaunchPlace& place, const GatedDeltaParams& params) {
  return recur(place, "delta_chunks", delta_chunks_kernel<4>, delta_chunks_kernel<8>, params);
}

#define LOCKSTEP_LAUNCHER(name, Params) launch_##name,
extern const KernelTable kernel_table = {LOCKSTEP_PROTOCOL_KERNELS(LOCKSTEP_LAUNCHER) error_text};
extern const EngineKernels engine_kernels = {LOCKSTEP_ENGINE_KERNELS(LOCKSTEP_LAUNCHER)};
#undef LOCKSTEP_LAUNCHER

}  // namespace SIMT_VARIANT
}  // namespace lockstep::cuda
