// Rows of sparse MLA in layouts of bytes (rule 5 of PartLayout): how they are rounded, where they
// lie, and the kernel that writes them. packed_rows.cuh reads them for attention.
//
// 1. latent_fp8_rows: a tile's scale is the power of two that is no less than
//    max(largest |element| * (1/448), 1e-4). latent_fp8_areas: than max(largest, 1e-4) / 448.
//    Elements are e4m3(x / scale). A GPU takes the power by an approximate logarithm, and may take
//    its neighbour where the quotient is within an ulp of a power of two.
// 2. latent_fp4_rows: a tile's scale is e4m3(max(largest * (1/6), 2^-9)), its elements are
//    e2m1(x * (1 / scale)), and the rope is e4m3 without a scale.
#pragma once

#include "cuda_backend/kernels/cache_write.cuh"

namespace lockstep::cuda {
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

__device__ __forceinline__ float power_no_less(float x) {
  return __uint_as_float((__float_as_uint(x) + 0x7FFFFFu) & 0xFF800000u);
}

// A tile of fp8, of which a lane has the elements from `first` on.
template <Scaling kScaling, bool kBf16>
__device__ __forceinline__ void write_fp8_tile(const PartWrite& part, const SlotPlace& place,
                                               const std::byte* source, std::byte* row,
                                               std::int32_t tile) {
  constexpr int kTile = latent_tiles(kScaling).tile, kEach = kTile / 32;
  const std::int32_t first = tile * kTile + std::int32_t(threadIdx.x) * kEach;
  float values[kEach], largest = 0.0f;
  load_numbers<kEach, kBf16>(values, source, first, part.source_dtype);
  SIMT_UNROLL
  for (int i = 0; i < kEach; ++i) largest = fmaxf(largest, fabsf(values[i]));
  largest = simt::warp_max(largest);
  constexpr bool kExponents = kScaling == Scaling::latent_fp8_areas;
  const float scale = power_no_less(kExponents ? fmaxf(largest, 1e-4f) / 448.0f
                                               : fmaxf(largest * (1.0f / 448.0f), 1e-4f));
  if (threadIdx.x == 0) {
    std::byte* scale_at = scale_of_tile(part.to, place.block, place.offset, tile);
    if constexpr (kExponents)
      *scale_at = std::byte(__float_as_uint(scale) >> 23);
    else
      store_number(scale_at, scale, DType::fp32);
  }
  const float inverse = 1.0f / scale;  // exact: a power of two
  std::uint32_t word = 0;
  SIMT_UNROLL
  for (int i = 0; i < kEach; ++i) word |= encode(values[i] * inverse, DType::fp8_e4m3) << (8 * i);
  store_word(row + first, word, kEach, kEach);
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
  store_word(row + 8 * tile, word, 8, reinterpret_cast<std::uintptr_t>(row) % 8 == 0 ? 8 : 1);
}

// Grid: x is the source row, y the part. A CTA is one warp. The warp takes a tile of fp8 at a time,
// a lane a tile of fp4; then the lanes take the rope.
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
    for (std::int32_t tile = 0; tile < kCount; ++tile)
      write_fp8_tile<kScaling, kBf16>(part, place, source, row, tile);
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

}  // namespace SIMT_VARIANT
}  // namespace lockstep::cuda
