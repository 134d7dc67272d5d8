// Rows of 4-bit elements, two a byte: int4 with a scale and a zero for each token and head, e2m1
// with an e4m3 scale for every 16 elements (nvfp4). How they are rounded, where they lie, and the
// kernels that write them. split_attention.cuh reads them.
//
// 1. e2m1 is 0, 0.5, 1, 1.5, 2, 3, 4, 6 with a sign. It rounds to nearest, ties to even, and
//    saturates; NaN becomes 6.
// 2. A group's scale is e4m3(g * (largest |element| * (1/6))) with g = 1 / layer_scale, and its
//    elements are e2m1(x * (1 / (scale * (1 / g)))): the steps of vLLM's writer, each rounded in
//    fp32. Its quotients are approximate on a GPU (rcp.approx.ftz), so a scale or an element next
//    to a tie may be the neighbour there. A scale of zero makes zeros.
// 3. A row of int4 has scale max((highest - lowest) / 15, 1e-6) and zero round(-lowest / scale). It
//    stores round(x * (1 / scale) + zero), both from 0 to 15 and rounded half away from zero: the
//    steps of vLLM's Triton kernel, none of them fused.
#pragma once

#include "cuda_backend/kernels/cache_write.cuh"

namespace lockstep::cuda {

// Rows of sparse MLA in layouts of bytes (rule 5 of PartLayout): how they are rounded, where they
// lie, and the kernel that writes them. packed_rows.cuh reads them for attention.
//
// 1. latent_fp8_rows: a tile's scale is the power of two that is no less than
//    max(largest |element| * (1/448), 1e-4). latent_fp8_areas: than max(largest, 1e-4) / 448.
//    Elements are e4m3(x / scale). A GPU takes the power by an approximate logarithm, and may take
//    its neighbour where the quotient is within an ulp of a power of two.
// 2. latent_fp4_rows: a tile's scale is e4m3(max(largest * (1/6), 2^-9)), its elements are
//    e2m1(x * (1 / scale)), and the rope is e4m3 without a scale.

namespace SIMT_VARIANT {

inline constexpr std::int32_t kRopeElements = 64;

// Of a row, by its Scaling. rope: the byte where it begins.
struct LatentTiles {
  std::int32_t elements, tile, rope, rope_bytes;
};
__device__ __forceinline__ constexpr LatentTiles latent_tiles(Scaling scaling) {
  if (scaling == Scaling::latent_fp8_rows) return {512, 128, 528, 2};
  if (scaling == Scaling::latent_fp8_areas) return {448, 64, 448, 2};
  return {512, 16, 256, 1};
}

// The byte, or the first of four, that a tile's scale lies at.
__device__ __forceinline__ std::byte* scale_of_tile(const PartLayout& part, std::int64_t block,
                                                    std::int64_t offset, std::int32_t tile) {
  std::int32_t at = tile;
  if (part.scaling == Scaling::latent_fp8_rows) at = 4 * tile;
  if (part.scaling == Scaling::latent_fp4_rows) at = 8 * (tile & 3) + (tile >> 2);
  return part.scales + block * part.scale_block_stride + offset * part.scale_token_stride + at;
}

// Bytes of the widest access, up to 8, that an address allows.
__device__ __forceinline__ std::int32_t unit_at(const std::byte* address) {
  const auto low = std::int32_t(reinterpret_cast<std::uintptr_t>(address) & 7);
  return low == 0 ? 8 : low & -low;
}

__device__ __forceinline__ float power_no_less(float x) {
  return __uint_as_float((__float_as_uint(x) + 0x7FFFFFu) & 0xFF800000u);
}

// Elements of fp8, 16 for a lane, of a tile for a few lanes. Lanes past the last tile have none.
template <Scaling kScaling, bool kBf16>
__device__ __forceinline__ void write_fp8_tiles(const PartWrite& part, const SlotPlace& place,
                                                const std::byte* source, std::byte* row) {
  constexpr LatentTiles kTiles = latent_tiles(kScaling);
  constexpr int kEach = 16, kLanes = kTiles.tile / kEach;
  const std::int32_t lane = threadIdx.x, first = lane * kEach;
  const bool has_some = first < kTiles.elements;
  float values[kEach] = {}, largest = 0.0f;
  if (has_some) load_numbers<kEach, kBf16>(values, source, first, part.source_dtype);
  SIMT_UNROLL
  for (int i = 0; i < kEach; ++i) largest = fmaxf(largest, fabsf(values[i]));
  largest = simt::warp_max<float, kLanes>(largest);
  if (!has_some) return;
  constexpr bool kExponents = kScaling == Scaling::latent_fp8_areas;
  const float scale = power_no_less(kExponents ? fmaxf(largest, 1e-4f) / 448.0f
                                               : fmaxf(largest * (1.0f / 448.0f), 1e-4f));
  if (lane % kLanes == 0) {
    std::byte* scale_at = scale_of_tile(part.to, place.block, place.offset, lane / kLanes);
    if constexpr (kExponents)
      *scale_at = std::byte(__float_as_uint(scale) >> 23);
    else
      store_number(scale_at, scale, DType::fp32);
  }
  const float inverse = 1.0f / scale;  // exact: a power of two
  const std::int32_t unit = unit_at(row);
  SIMT_UNROLL
  for (int half = 0; half < kEach; half += 8) {
    std::uint64_t word = 0;
    SIMT_UNROLL
    for (int i = 0; i < 8; ++i)
      word |= std::uint64_t(encode(values[half + i] * inverse, DType::fp8_e4m3)) << (8 * i);
    store_word(row + first + half, word, 8, unit);
  }
}

template <bool kBf16>
__device__ __forceinline__ void write_fp4_tile(const PartWrite& part, const SlotPlace& place,
                                               const std::byte* source, std::byte* row,
                                               std::int32_t tile) {
  float values[16], largest = 0.0f;
  load_numbers<16, kBf16>(values, source, 16 * tile, part.source_dtype);
  SIMT_UNROLL
  for (int i = 0; i < 16; ++i) largest = fmaxf(largest, fabsf(values[i]));
  const std::uint32_t bits = encode(fmaxf(largest * (1.0f / 6.0f), 0.001953125f), DType::fp8_e4m3);
  const float inverse = 1.0f / decode(bits, DType::fp8_e4m3);
  *scale_of_tile(part.to, place.block, place.offset, tile) = std::byte(bits);
  std::uint64_t word = 0;
  SIMT_UNROLL
  for (int i = 0; i < 16; ++i) word |= std::uint64_t(encode_e2m1(values[i] * inverse)) << (4 * i);
  store_word(row + 8 * tile, word, 8, unit_at(row));
}

// Grid: x is the source row, y the part. A CTA is one warp. A few lanes share a tile of fp8, a lane
// has a tile of fp4; then the lanes take the rope.
template <Scaling kScaling, bool kBf16>
__global__ void write_latent_rows_kernel(WritePartsParams p) {
  const PartWrite& part = p.parts[blockIdx.y];
  const std::uint32_t source_row = blockIdx.x;
  const Slot slot = slot_of_row(p.token_rows, p.slots, source_row);
  if (slot < 0) return;
  const SlotPlace place = place_of_slot(slot, part.to.block_size);
  constexpr LatentTiles tiles = latent_tiles(kScaling);
  const std::byte* source = part.source + source_row * part.source_row_stride;
  std::byte* row = part_row(part.to, place.block, place.offset, 0);
  constexpr std::int32_t kCount = tiles.elements / tiles.tile;
  if constexpr (kScaling == Scaling::latent_fp4_rows) {
    write_fp4_tile<kBf16>(part, place, source, row, std::int32_t(threadIdx.x));
  } else {
    write_fp8_tiles<kScaling, kBf16>(part, place, source, row);
    if (kScaling == Scaling::latent_fp8_areas && threadIdx.x == 0)
      *scale_of_tile(part.to, place.block, place.offset, kCount) = std::byte(0);
  }
  float values[2];
  const std::int32_t first = 2 * std::int32_t(threadIdx.x);
  load_numbers<2, kBf16>(values, source, tiles.elements + first, part.source_dtype);
  SIMT_UNROLL
  for (int i = 0; i < 2; ++i)
    store_number(row + tiles.rope + (first + i) * tiles.rope_bytes, values[i],
                 tiles.rope_bytes == 2 ? DType::bf16 : DType::fp8_e4m3);
}

// Element `at` of a row as it is worth.
__device__ __forceinline__ float latent_element(const PartLayout& part, const std::byte* row,
                                                std::int64_t block, std::int64_t offset,
                                                std::int32_t at) {
  const LatentTiles tiles = latent_tiles(part.scaling);
  if (at >= tiles.elements)
    return load_number(row + tiles.rope + (at - tiles.elements) * tiles.rope_bytes,
                       tiles.rope_bytes == 2 ? DType::bf16 : DType::fp8_e4m3);
  const std::byte* scale_at = scale_of_tile(part, block, offset, at / tiles.tile);
  if (part.scaling == Scaling::latent_fp4_rows)
    return decode_e2m1(std::uint32_t(row[at / 2]) >> (4 * (at % 2)) & 15) *
           load_number(scale_at, DType::fp8_e4m3);
  const float scale = part.scaling == Scaling::latent_fp8_rows
                          ? load_number(scale_at, DType::fp32)
                          : __uint_as_float(std::uint32_t(*scale_at) << 23);
  return load_number(row + at, DType::fp8_e4m3) * scale;
}

inline constexpr std::int32_t kGroupElements = 16;  // that share a scale of fp4_groups

// The e4m3 scale of a group of a token and head.
__device__ __forceinline__ std::byte* group_scale(const PartLayout& part, std::int64_t block,
                                                  std::int64_t offset, std::int64_t head,
                                                  std::int32_t group) {
  if (part.swizzled_scales) {
    const std::int32_t quarter = part.head_size / (4 * kGroupElements);
    const auto token = std::int32_t(offset % 4);
    offset += group / quarter - token;
    group = group % quarter * 4 + token;
  }
  return part.scales + block * part.scale_block_stride + offset * part.scale_token_stride +
         head * part.scale_head_stride + group;
}

template <int kItem>
__device__ __forceinline__ void load_group(float (&values)[kGroupElements], const std::byte* source,
                                           DType dtype) {
  const std::int32_t bytes = element_bytes(dtype);
  SIMT_UNROLL
  for (int at = 0; at < kGroupElements; at += kItem) {
    std::uint32_t bits[kItem];
    load_bits<kItem>(bits, source + at * bytes, bytes);
    SIMT_UNROLL
    for (int i = 0; i < kItem; ++i) values[at + i] = decode(bits[i], dtype);
  }
}

// Grid: x flat over (source row, head, group), y is the part. items_per_row counts groups.
template <int kItem, int kFrom>
__global__ void write_groups_kernel(WritePartsParams p, PartDivisors by, std::int32_t unit) {
  const PartWrite& part = p.parts[blockIdx.y];
  const Divisor groups = of_part(by.items_per_row), heads = of_part(by.heads);
  const std::uint32_t count = p.num_rows * heads.value * groups.value;
  const float inverse_of_layer = 1.0f / *part.to.layer_scale;
  const DType from = format_of<kFrom>(part.source_dtype);
  for (std::uint32_t i = first_item(); i < count; i += item_stride()) {
    const std::uint32_t row = divide(i, groups), source = divide(row, heads);
    const std::uint32_t head = row - source * heads.value;
    const auto group = std::int32_t(i - row * groups.value);
    const Slot slot = slot_of_row(p.token_rows, p.slots, source);
    if (slot < 0) continue;
    const SlotPlace place = place_of_slot(slot, part.to.block_size);
    float values[kGroupElements];
    load_group<kItem>(values,
                      part.source + source * part.source_row_stride +
                          head * part.source_head_stride +
                          std::int64_t(group) * kGroupElements * element_bytes(from),
                      from);
    float largest = 0.0f;
    SIMT_UNROLL
    for (int e = 0; e < kGroupElements; ++e) largest = fmaxf(largest, fabsf(values[e]));
    const std::uint32_t scale_bits =
        encode(inverse_of_layer * (largest * (1.0f / 6.0f)), DType::fp8_e4m3);
    const float scale = decode(scale_bits, DType::fp8_e4m3);
    const float inverse = scale != 0.0f ? 1.0f / (scale * (1.0f / inverse_of_layer)) : 0.0f;
    std::uint64_t word = 0;
    SIMT_UNROLL
    for (int e = 0; e < kGroupElements; ++e)
      word |= std::uint64_t(encode_e2m1(values[e] * inverse)) << (4 * e);
    store_word(part_row(part.to, place.block, place.offset, head) + group * (kGroupElements / 2),
               word, 8, unit);
    *group_scale(part.to, place.block, place.offset, head, group) = std::byte(scale_bits);
  }
}

// A number cut off towards zero, from 0 to 15.
__device__ __forceinline__ std::int32_t to_int4(float value) {
  const float away = value >= 0.0f ? value + 0.5f : value - 0.5f;
  return away > 15.0f ? 15 : away >= 1.0f ? std::int32_t(away) : 0;
}

// Grid: as quantise_rows_kernel. Lanes take kItem elements (8 or 2) at a time.
template <int kLanes, int kItem, bool kBf16>
__global__ void write_int4_rows_kernel(WritePartsParams p, PartDivisors by) {
  const PartWrite& part = p.parts[blockIdx.y];
  const SharedRow<kLanes> shared(p, of_part(by.heads));
  const std::int32_t size = shared.slot < 0 ? 0 : part.to.head_size;
  const std::byte* source =
      part.source + shared.source * part.source_row_stride + shared.head * part.source_head_stride;
  const std::int32_t step = kLanes * kItem, first = shared.lane * kItem;
  float values[kItem] = {}, lowest = INFINITY, highest = -INFINITY;
  for (std::int32_t at = first; at < size; at += step) {
    load_numbers<kItem, kBf16>(values, source, at, part.source_dtype);
    SIMT_UNROLL
    for (int i = 0; i < kItem; ++i) {
      lowest = fminf(lowest, values[i]);
      highest = fmaxf(highest, values[i]);
    }
  }
  lowest = -simt::warp_max<float, kLanes>(-lowest);
  highest = simt::warp_max<float, kLanes>(highest);
  if (shared.slot < 0) return;
  const SlotPlace place = place_of_slot(shared.slot, part.to.block_size);
  const float scale = fmaxf((highest - lowest) / 15.0f, 1e-6f);
  const std::int32_t zero = to_int4(-lowest / scale);
  if (shared.lane == 0)
    *part_scale(part.to, place.block, place.offset, shared.head) =
        __uint_as_float((__float_as_uint(scale) & ~15u) | std::uint32_t(zero));
  std::byte* row = part_row(part.to, place.block, place.offset, shared.head);
  const float inverse = 1.0f / scale;
  for (std::int32_t at = first; at < size; at += step) {
    if (size > step) load_numbers<kItem, kBf16>(values, source, at, part.source_dtype);
    std::uint32_t word = 0;
    SIMT_UNROLL
    for (int i = 0; i < kItem; ++i)
      word |= std::uint32_t(to_int4(values[i] * inverse + float(zero))) << (4 * i);
    store_word(row + at / 2, word, kItem / 2, kItem / 2);
  }
}

// What a row's packed elements are read with: an int4 row's zero, and where the scales of groups
// begin.
struct PackedRow {
  std::int64_t block, offset;
  std::int32_t head;
  float zero;
};

// Elements [first, first + kItem) of a packed row, times their group's scale; 1 or 8 of them.
template <int kItem>
__device__ __forceinline__ void load_packed(float (&values)[kItem], const PartLayout& part,
                                            const std::byte* row, const PackedRow& at,
                                            std::int32_t first) {
  if (part.scaling >= kFirstLatent) {
    SIMT_UNROLL
    for (int i = 0; i < kItem; ++i)
      values[i] = latent_element(part, row, at.block, at.offset, first + i);
    return;
  }
  std::uint32_t word;
  if constexpr (kItem == 1)
    word = std::uint32_t(row[first / 2]) >> (4 * (first % 2));
  else
    word = *reinterpret_cast<const std::uint32_t*>(row + first / 2);
  if (part.scaling == Scaling::int4_rows) {
    SIMT_UNROLL
    for (int i = 0; i < kItem; ++i) values[i] = float(word >> (4 * i) & 15) - at.zero;
    return;
  }
  const std::byte* scale_at =
      group_scale(part, at.block, at.offset, at.head, first / kGroupElements);
  const float scale = decode(std::uint32_t(*scale_at), DType::fp8_e4m3);
  SIMT_UNROLL
  for (int i = 0; i < kItem; ++i) values[i] = decode_e2m1(word >> (4 * i) & 15) * scale;
}

}  // namespace SIMT_VARIANT
}  // namespace lockstep::cuda
