// Joins the partial softmaxes of split_attention.cuh: each was taken relative to its own maximum,
// so its sum and its values are rescaled to the highest of all before they are added, in the order
// of the splits. A query with one split has its output already; one without keys gets zeros.
#pragma once

#include "cuda_backend/kernels/split_attention.cuh"

namespace lockstep::cuda {
namespace SIMT_VARIANT {

// Grid: x is the token, y the query head; threads share the elements of the output.
// kRescaled false is KernelDefect::combine_unscaled, which is planted here because the factors are
// worked out here.
template <bool kRescaled>
__global__ void attention_combine_kernel(SplitAttentionParams p) {
  const std::int64_t token = blockIdx.x;
  const std::int32_t query_head = blockIdx.y, row = p.token_rows[token];
  if (row < 0) return;
  float* output = p.outputs + (token * p.num_query_heads + query_head) * p.value.head_size;
  const std::int32_t num_splits = splits_of(visible_keys(p, token, row), p.split_keys);
  if (num_splits == 1) return;
  float maximum = -INFINITY;
  for (std::int32_t split = 0; split < num_splits; ++split)
    maximum = fmaxf(maximum, partial_of(p, token, query_head, split)[0]);
  for (std::int32_t at = threadIdx.x; at < p.value.head_size; at += blockDim.x) {
    float sum = 0.0f, value = 0.0f;
    for (std::int32_t split = 0; split < num_splits; ++split) {
      const float* partial = partial_of(p, token, query_head, split);
      const float factor = kRescaled ? exp_nonpositive(partial[0] - maximum) : 1.0f;
      sum = fmaf(factor, partial[1], sum);
      value = fmaf(factor, partial[2 + at], value);
    }
    output[at] = sum > 0.0f ? value / sum : 0.0f;
  }
}

}  // namespace SIMT_VARIANT
}  // namespace lockstep::cuda
