// The numbers in a cache's rows, and their storage formats (sim/protocol/backend.h, rules 1 and
// 13).
//
// Invariants
// (1) `words` moves bits; every bit pattern is an element of the cache's format.
// (2) `real`: rows are bf16, fp16 or fp32 numbers. A cache of 8-bit elements stores them divided by
//     a scale and rounded to nearest, ties to even (int8: ties away from zero). The scale is the
//     layer's, or the row's own, which follows from its largest element and is stored after the
//     row.
// (3) Rounding searches the nearest of all patterns of the format, once for each of the 1,024
//     numbers that an element can be before quantization; no kernel rounds this way, so the two are
//     independent. Rows with their own scales have 512 tables, one per possible largest element.
// (4) nvfp4: e2m1 elements, two per byte, with an e4m3 scale for every 16 elements of a row, in
//     units of the layer's scale. The scale follows from the largest of the 16.
// (5) int4: whole numbers from 0 to 15, two per byte, with a scale and a zero per row, which follow
//     from its lowest and highest element; the zero is in the scale's lowest four bits.
// (6) All tables are built once and never change; any thread may read them.
//
// Not here: caches whose elements are not numbers (uint8), which keep their words.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "reference/types/kv_cache_spec.h"
#include "reference/types/view_types.h"

namespace lockstep {

// Elements before quantization: bf16 numbers with four exponents, so that the stored elements
// saturate, are in the middle of the format, are among its smallest, and are 0. The masks are those
// of rule (13). source_index() has the sign in bit 9 and the magnitude below, in order.
inline constexpr std::uint64_t kSourceKeep = 0x8A7F, kSourceSet = 0x3500;
inline constexpr std::size_t kMagnitudes = 512;
constexpr std::size_t source_index(std::uint64_t bits) {
  return (bits >> 6 & 0x200) | (bits >> 3 & 0x100) | (bits >> 2 & 0x80) | (bits & 0x7F);
}
constexpr std::uint32_t source_bits(std::size_t index) {
  return static_cast<std::uint32_t>((index & 0x200) << 6 | (index & 0x100) << 3 |
                                    (index & 0x80) << 2 | (index & 0x7F) | kSourceSet);
}

// The stored form of every number before quantization, by source_index().
struct StoredNumbers {
  float scale = 1;
  std::uint8_t scale_bits = 0;                        // nvfp4: the e4m3 pattern of a group's scale
  std::array<std::uint8_t, 2 * kMagnitudes> bytes{};  // the stored pattern
  std::array<double, 256> values{};                   // by pattern, scale included
  double worth(std::size_t index) const { return values[bytes[index]]; }
};

// The table of a layer whose rows share one scale; null: rows are stored as generated. `layer` as
// in rule (1): neighbouring layers have different scales.
const StoredNumbers* stored_numbers(Numbers numbers, DType dtype, std::int64_t layer);

// Tables [kMagnitudes] by a row's largest magnitude; null: rows have no scales of their own.
const StoredNumbers* numbers_by_largest(Numbers numbers, KVQuantMode mode);
// The scale and zero of an int4 row with given extremes.
struct Int4Row {
  float scale =
      1;  // elements are stored times its reciprocal; reading drops the bits that hold the zero
  // The stored number that stands for 0.
  int zero = 0;
  std::uint32_t bits() const;      // the bits stored after the row
  int nearest(float x) const;      // the stored number of an element
  double worth(int stored) const;  // the value of a stored number
};
// Rounds in fp32 as the kernels do. A row of equal elements gets the smallest scale, 1e-6.
Int4Row int4_row(float lowest, float highest);

// Tables [kMagnitudes] by the largest magnitude of 16 elements; null: groups have no scales.
// `bytes` are then four bits wide.
const StoredNumbers* numbers_by_group(Numbers numbers, KVQuantMode mode, std::int64_t layer);

// Tables of the tiles of rows in byte layouts, by a tile's largest magnitude. `bytes` of fp4 are
// four bits wide. fp8: the scale is the smallest power of two that is at least the
// largest element / 448; `scale_bits` is its exponent, biased by 127. `divides`: the quotient is
// computed by division, otherwise by multiplication with 1 / 448, which rounds differently.
const StoredNumbers& numbers_of_fp8_tile(std::size_t magnitude, bool divides);
// The scale is e4m3(largest element * (1 / 6)), at least 1 / 512: e4m3's smallest number.
const StoredNumbers& numbers_of_fp4_tile(std::size_t magnitude);
// e4m3 without a scale, by source_index().
struct E4m3 {
  std::uint8_t bits = 0;
  double worth = 0;
};
E4m3 e4m3_of_source(std::size_t index);

// Rows of sparse MLA in byte layouts, as numbers: a latent in tiles that share a scale, and a rope
// part after it, both written from bf16 elements. Sources:
// vllm/models/deepseek_v32/common/kernels.py and vllm/models/deepseek_v4/common/ops/cache_utils.py.
//
// | bytes | latent                 | its scales                     | rope    |
// |-------|------------------------|--------------------------------|---------|
// | 656   | 512 e4m3, tiles of 128 | fp32 powers of two, after it   | 64 bf16 |
// | 584   | 448 e4m3, tiles of 64  | their exponents, 7 bytes and 0 | 64 bf16 |
// | 352   | 512 e2m1, tiles of 16  | e4m3, four interleaved         | 64 e4m3 |
//
// 1. The row of 352 bytes has its rope before its scales.
// 2. In a page of rows of 584 bytes, the data of all rows comes first, 576 bytes each, then the
//    scales of all rows.

enum class LatentFormat : std::uint8_t { none, fp8_656, fp8_584, fp4_352 };

// none: the rows are words, or have another layout.
LatentFormat latent_format(Numbers numbers, const KVCacheSpec& spec);
std::int64_t latent_elements(LatentFormat format);    // per row, rope included
std::int64_t latent_data_bytes(LatentFormat format);  // per row, without scales stored apart

// Writes the row that a token's elements give (`key`: row_key() of content.h). REQUIRES: `row` has
// all its bytes, scales included.
void draw_latent_row(std::uint64_t key, LatentFormat format, std::span<std::uint8_t> row);
// Writes the values of the row's elements as attention reads them. REQUIRES: `row` has
// latent_elements(format) elements.
void decode_latent_row(std::uint64_t key, LatentFormat format, std::span<double> row);

}  // namespace lockstep
