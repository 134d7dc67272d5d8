// Softmax attention as plain loops in double precision: what an fp32 kernel must come close to.
//
// The tolerance is a worst case, from the number of operations: with u = 2^-24 and all |q|, |k|,
// |v| <= 1,
//   a score q.k / sqrt(d) of d products is off by at most (d + 2) * sqrt(d) * u,
//   a weight exp(s - max) therefore by a factor 1 +- (2 * score error + 4u),
//   the two sums over n positions by n * u each, and their quotient by 2u,
// so an output, a mean of numbers within +-1, is off by at most twice the sum of these.
//
// Real numbers are attended to by another kernel, whose sums go in tiles of 32 keys, in splits
// of no less: with T of each at most, every tile and split rescales by a factor off by 4u, a weight
// is off by u times the range R of the scores besides, and the scale of an 8-bit cache is a product
// more. Its |k| and |v| are at most kStoredMax, what 1 / scale rounds up to. With |score| at most
// kStoredMax sqrt(d),
//   2 ((d + 4) kStoredMax sqrt(d) + 4 (2 T + 1) + 2 kStoredMax sqrt(d) + n + 4) u kStoredMax.
//
// A kernel with queries of 16 bits also rounds its weights, which enter a sum and its divisor, and
// its output to them: 3 kStoredMax half steps more, 2^-9 of bf16, 2^-12 of fp16.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "reference/memory/content.h"
#include "reference/memory/memory_model.h"

namespace lockstep {

// e5m2 has 96, 112 and 128 where 1 / scale is 107.5 at least and 123.5 at most; the scale of 16
// elements of nvfp4 is up to 1/16 too large, and a step of int4 up to 2/15.
inline constexpr double kStoredMax = 1.07;

// Whether the layer's rows are numbers within +-1 that attention can be worked out from.
bool has_attention_oracle(const ModelLayer& layer);

// [num_kv_heads * queries_per_kv, head_size] for the query of content `query` over `contents`, the
// contents of the positions that it reads. REQUIRES: has_attention_oracle(layer), contents not
// empty.
std::vector<double> attention_output(const ModelLayer& layer, std::span<const ContentId> contents,
                                     ContentId query, std::int32_t queries_per_kv,
                                     DType query_dtype = DType::fp32);

double attention_tolerance(std::int64_t head_size, std::int64_t positions);
double real_attention_tolerance(std::int64_t head_size, std::int64_t positions);
// What a kernel with queries of this dtype adds to either.
double rounding_tolerance(DType query_dtype);

// Element i of a row as a number.
double row_element(std::uint64_t key, std::int64_t i, DType dtype);

}  // namespace lockstep
