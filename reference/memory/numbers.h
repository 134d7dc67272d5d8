// Content of a cache's rows, and how they are made (sim/protocol/backend.h, rules 1, 13).
//
// Invariants
// (1) `words` moves bits; every bit pattern is an element of the cache's format.
// (2) `real`: rows are bf16, fp16 or fp32 numbers. A cache of 8-bit elements holds them divided by
//     a scale and rounded to nearest, ties to even (int8: ties away from zero). The scale is the
//     layer's, or the row's own, which follows from its largest element and is stored after the
//     row.
// (3) Rounding searches the nearest of all patterns of the format, once for each of the 256 numbers
//     that a bf16 element can be; no kernel rounds this way. Rows with their own scales have 128
//     tables, one per possible largest element.
// (4) nvfp4: e2m1 elements, two per byte, with an e4m3 scale for every 16 elements of a row, in
//     units of the layer's scale. The scale follows from the largest of the 16.
// (5) int4: whole numbers from 0 to 15, two per byte, with a scale and a zero per row, which follow
//     from its lowest and highest element; the zero is in the scale's lowest four bits.
// Not here: caches whose elements are not numbers (uint8), which keep their words.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "reference/types/kv_cache_spec.h"
#include "reference/types/view_types.h"

namespace lockstep {

// Of every bf16 number in +-[0.5, 1): its sign in bit 7 of the index, its mantissa below.
struct StoredNumbers {
  float scale = 1;
  std::uint8_t scale_bits = 0;            // nvfp4: the e4m3 pattern of a group's scale
  std::array<std::uint8_t, 256> bytes{};  // what the cache holds
  std::array<double, 256> worth{};        // what that stands for, the scale included
};

// Null where rows are stored as they are made. `layer` as in rule (1).
const StoredNumbers* stored_numbers(Numbers numbers, DType dtype, std::int64_t layer);

inline constexpr int kMantissas = 128;  // of a bf16 number in [0.5, 1)
// [kMantissas], by the mantissa of a row's largest element; null where rows have no scales of their
// own.
const StoredNumbers* numbers_by_largest(Numbers numbers, KVQuantMode mode);
// A row of int4 with these extremes.
struct Int4Row {
  float scale =
      1;  // as elements are divided by it; the row is read with its pattern's zero left out
  int zero = 0;
  std::uint32_t bits() const;  // the bits stored after the row
  int nearest(float x) const;  // what an element is stored as
  double worth(int stored) const;
};
Int4Row int4_row(float lowest, float highest);

// [kMantissas], by the mantissa of the largest of 16 elements; null where groups have no scales.
// `bytes` are then halves of one.
const StoredNumbers* numbers_by_group(Numbers numbers, KVQuantMode mode, std::int64_t layer);

// Tiles of rows in layouts of bytes, by the mantissa of a tile's largest element.
// `bytes` of fp4 are halves of one. fp8: the scale is the power of two that is no less than the
// largest element divided by 448; `scale_bits` is its exponent, biased by 127. `divides`: by a
// quotient, else by a product with 1 / 448.
const StoredNumbers& numbers_of_fp8_tile(std::size_t mantissa, bool divides);
// The scale is e4m3(the largest element * (1 / 6)).
const StoredNumbers& numbers_of_fp4_tile(std::size_t mantissa);
// e4m3 without a scale, by a bf16 number's index in StoredNumbers.
struct E4m3 {
  std::uint8_t bits = 0;
  double worth = 0;
};
E4m3 e4m3_of_source(std::size_t index);

// Rows of sparse MLA in layouts of bytes, as numbers: a latent in tiles that share a scale, and a
// rope behind it, written from bf16 elements. Sources: vllm/models/deepseek_v32/common/kernels.py
// and vllm/models/deepseek_v4/common/ops/cache_utils.py.
//
// | bytes | latent                 | its scales                     | rope    |
// |-------|------------------------|--------------------------------|---------|
// | 656   | 512 e4m3, tiles of 128 | fp32 powers of two, behind it  | 64 bf16 |
// | 584   | 448 e4m3, tiles of 64  | their exponents, 7 bytes and 0 | 64 bf16 |
// | 352   | 512 e2m1, tiles of 16  | e4m3, four interleaved         | 64 e4m3 |
//
// 1. The row of 352 bytes has its rope in front of its scales.
// 2. Of rows of 584 bytes a page has the data of all, 576 bytes each, and then the scales of all.

enum class LatentFormat : std::uint8_t { none, fp8_656, fp8_584, fp4_352 };

// none where the rows are words, or have another layout.
LatentFormat latent_format(Numbers numbers, const KVCacheSpec& spec);
std::int64_t latent_elements(LatentFormat format);    // of a row, rope included
std::int64_t latent_data_bytes(LatentFormat format);  // of a row, without scales of an area

// The row that a token's elements make (`key`: content.h). REQUIRES: row has all its bytes.
void draw_latent_row(std::uint64_t key, LatentFormat format, std::span<std::uint8_t> row);
// What its elements are worth. REQUIRES: latent_elements(format) of them.
void decode_latent_row(std::uint64_t key, LatentFormat format, std::span<double> row);

}  // namespace lockstep
