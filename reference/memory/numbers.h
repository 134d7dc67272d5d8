// What stands in the rows of a cache, and what that takes (sim/protocol/backend.h, rules 1, 13).
//
// (1) `words` moves bits; every element is one whatever the cache's format.
// (2) `real`: rows are bf16, fp16 or fp32 numbers; a cache of 8-bit elements holds them divided by
//     a scale and rounded to nearest, ties to even (int8: ties away from zero). The scale is the
//     layer's, or the row's own, which follows from its largest element and lies behind the row.
// (3) Rounding is done here by looking for the nearest of all patterns of the format, once for each
//     of the 256 numbers that a bf16 element can be; no kernel rounds like that. Of rows with
//     scales of their own there are 128, as many as a largest element can be.
// Not here: caches whose elements are no numbers (uint8), which keep their words.
#pragma once

#include <array>
#include <cstdint>

#include "reference/types/kv_cache_spec.h"
#include "reference/types/view_types.h"

namespace lockstep {

// Of every bf16 number in +-[0.5, 1): its sign in bit 7 of the index, its mantissa below.
struct StoredNumbers {
  float scale = 1;
  std::array<std::uint8_t, 256> bytes{};  // what the cache holds
  std::array<double, 256> worth{};        // what that stands for, the scale included
};

// Null where rows are stored as they are made. `layer` as in rule (1).
const StoredNumbers* stored_numbers(Numbers numbers, DType dtype, std::int64_t layer);

inline constexpr int kMantissas = 128;  // of a bf16 number in [0.5, 1)
// [kMantissas], by the mantissa of a row's largest element; null where rows have no scales of their
// own.
const StoredNumbers* numbers_by_largest(Numbers numbers, KVQuantMode mode);

}  // namespace lockstep
