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
__device__ __forceinline__ LatentTiles latent_tiles(Scaling scaling) {
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

__device__ __forceinline__ void write_tile(const PartWrite& part, const SlotPlace& place,
                                           const LatentTiles& tiles, const std::byte* source,
                                           std::byte* row, std::int32_t tile) {
  const std::int32_t bytes = element_bytes(part.source_dtype), first = tile * tiles.tile;
  float largest = 0.0f;
  for (std::int32_t i = first; i < first + tiles.tile; ++i)
    largest =
        fmaxf(largest, fabsf(load_number(source + std::int64_t(i) * bytes, part.source_dtype)));
  std::byte* scale_at = scale_of_tile(part.to, place.block, place.offset, tile);
  if (part.to.scaling == Scaling::latent_fp4_rows) {
    const std::uint32_t bits =
        encode(fmaxf(largest * (1.0f / 6.0f), 0.001953125f), DType::fp8_e4m3);
    const float inverse = 1.0f / decode(bits, DType::fp8_e4m3);
    *scale_at = std::byte(bits);
    for (std::int32_t i = first; i < first + tiles.tile; i += 2) {
      std::uint32_t both = 0;
      SIMT_UNROLL
      for (int half = 0; half < 2; ++half)
        both |=
            encode_e2m1(load_number(source + std::int64_t(i + half) * bytes, part.source_dtype) *
                        inverse)
            << (4 * half);
      row[i / 2] = std::byte(both);
    }
    return;
  }
  const bool has_exponents = part.to.scaling == Scaling::latent_fp8_areas;
  const float scale = power_no_less(has_exponents ? fmaxf(largest, 1e-4f) / 448.0f
                                                  : fmaxf(largest * (1.0f / 448.0f), 1e-4f));
  if (has_exponents)
    *scale_at = std::byte(__float_as_uint(scale) >> 23);
  else
    store_number(scale_at, scale, DType::fp32);
  for (std::int32_t i = first; i < first + tiles.tile; ++i)
    row[i] = std::byte(encode(
        load_number(source + std::int64_t(i) * bytes, part.source_dtype) / scale, DType::fp8_e4m3));
}

// Grid: x is the source row, y the part. A CTA is one warp, whose lanes take a tile each, and then
// the rope.
[[maybe_unused]] static __global__ void write_latent_rows_kernel(WritePartsParams p) {
  const PartWrite& part = p.parts[blockIdx.y];
  const std::uint32_t source_row = blockIdx.x;
  const Slot slot = slot_of_row(p.token_rows, p.slots, source_row);
  if (slot < 0) return;
  const SlotPlace place = place_of_slot(slot, part.to.block_size);
  const LatentTiles tiles = latent_tiles(part.to.scaling);
  const std::byte* source = part.source + source_row * part.source_row_stride;
  std::byte* row = part_row(part.to, place.block, place.offset, 0);
  const std::int32_t count = tiles.elements / tiles.tile;
  for (std::int32_t tile = threadIdx.x; tile < count; tile += 32)
    write_tile(part, place, tiles, source, row, tile);
  if (part.to.scaling == Scaling::latent_fp8_areas && threadIdx.x == 0)
    *scale_of_tile(part.to, place.block, place.offset, count) = std::byte(0);
  const std::int32_t bytes = element_bytes(part.source_dtype);
  for (std::int32_t i = threadIdx.x; i < kRopeElements; i += 32)
    store_number(row + tiles.rope + i * tiles.rope_bytes,
                 load_number(source + std::int64_t(tiles.elements + i) * bytes, part.source_dtype),
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
