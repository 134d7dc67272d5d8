// Softmax attention as plain loops in double precision: the result that an fp32 kernel must come
// close to, and how close.
//
// The tolerance is a worst case that follows from the number of operations. With u = 2^-24 and all
// |q|, |k|, |v| <= 1:
//   a score q.k / sqrt(d) of d products is off by at most (d + 2) * sqrt(d) * u,
//   a weight exp(s - max) therefore by a factor 1 +- (2 * score error + 4u),
//   the two sums over n positions by n * u each, and their quotient by 2u (a kernel sums in tiles
//   of at least 32, whose own errors and rescaling, 4u each, stay below that),
// so an output, a mean of numbers within +-1, is off by at most twice the sum of these.
//
// Real numbers are attended to by another kernel. It sums in tiles of 32 keys, within splits of at
// least 32. With at most T tiles and T splits, every tile and split rescales by a factor that is
// off by 4u, a weight is also off by u times the range R of the scores, and the scale of an 8-bit
// cache is one more product. Its |k| and |v| are at most kStoredMax. With f the factor of a query's
// first element and S = kStoredMax (f + d - 1) / sqrt(d), the largest sum of |q k| / sqrt(d), the
// bound is
//   2 ((d + 4) S + 4 (2 T + 1) + 2 S + n + 4) u kStoredMax.
//
// A kernel with queries of 16 bits also rounds its weights, which enter a sum and its divisor, and
// its output to 16 bits: 3 kStoredMax half steps more, of 2^-9 for bf16 and 2^-12 for fp16.
//
// Not checked here: which positions a query reads, and the comparison itself (sim/check/).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "reference/memory/content.h"
#include "reference/memory/memory_model.h"

namespace lockstep {

// The largest stored |k| or |v|. The scale of 16 elements of nvfp4 is up to 1/16 too large, and a
// step of int4 up to 2/15.
inline constexpr double kStoredMax = 1.07;

// True if the layer's rows are numbers within +-1 that attention can be computed from. False for
// states, hidden states, and bytes without a number format.
bool has_attention_oracle(const ModelLayer& layer);

// The last decoded rows: a request's next step reads nearly the same. Rows are found by their keys,
// which differ between layers and heads. A new row takes the place of one with the same slot.
class DecodedRows {
 public:
  // Rows of a cache of `num_rows` rows. Those of a large cache evict each other before they are
  // read again, and are not kept.
  explicit DecodedRows(std::int64_t num_rows) : keeps_rows_(num_rows <= 8 * kSlots) {}
  // Returns the row of the layer as attention reads it: quantized and read back. It is in `room`,
  // or kept until the next call.
  std::span<const double> read(std::uint64_t key, const ModelLayer& layer, std::span<double> room);

 private:
  static constexpr std::int64_t kSlots = 4096;  // 4 MiB of rows of 128 numbers

  struct Slot {
    std::uint64_t key = 0;
    std::vector<double> row;
  };
  const bool keeps_rows_;
  std::vector<Slot> slots_;
};

// Computes the attention output [queries_per_kv, head_size] of the query heads that read `kv_head`,
// for the query with content `query` over `contents`, the contents of the positions that it reads,
// in order. The query's first element is multiplied by `first_factor`. `decoded` keeps the rows.
// REQUIRES: has_attention_oracle(layer), a position, and zeros in `output`.
void attend(const ModelLayer& layer, std::int32_t kv_head, std::span<const ContentId> contents,
            ContentId query, std::int32_t queries_per_kv, DecodedRows& decoded, DType query_dtype,
            double first_factor, std::span<double> output);

// Rule (13): scores of one query in eight exceed the range of exp() in fp32, so a softmax must
// subtract the largest.
constexpr double first_factor_of(Numbers numbers, ContentId query) {
  return numbers == Numbers::real && query % 8 == 0 ? 4096 : 1;
}

// The maximum absolute error of an output element: rows as generated, and rows of real numbers.
double attention_tolerance(std::int64_t head_size, std::int64_t positions);
double real_attention_tolerance(std::int64_t head_size, std::int64_t positions,
                                double first_factor);
// The error that a kernel with queries of this dtype adds to either; 0: fp32.
double rounding_tolerance(DType query_dtype);

// Element i of a row of words, as a number. REQUIRES: a floating-point dtype.
double row_element(std::uint64_t key, std::int64_t i, DType dtype);

}  // namespace lockstep
