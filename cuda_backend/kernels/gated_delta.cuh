// The gated delta rule (Qwen3-Next's linear attention), for chunks, single tokens and speculative
// tokens: each warp carries one row of a head's state over the tokens of a request.
//
// Tolerance, in units of u = 2^-24, of the length of the row's error. What a token reads back
// (h k) feeds into the state again, but |k| <= 1 and beta <= 1 keep that map from growing anything,
// so errors add up: a token adds 6 + |g| + 2 (columns / 32 + 8) + 4 (columns / 64 + 6) times
// |h| + |v|, which are the decay, two sums over columns and the lengths of k. An output is off by
// |q| times the error, and by its own sum (advance() of tests/cuda_backend/recurrence_oracle.h). A
// stored state is rounded once more to its dtype.
#pragma once

#include "cuda_backend/kernels/state_rows.cuh"

namespace lockstep::cuda {
namespace SIMT_VARIANT {

// 1 / |vector|, with the 1e-6 that vLLM adds to the squares.
__device__ __forceinline__ float reciprocal_length(const float* vector, std::int32_t columns) {
  float sum = 0.0f;
  for_own_columns(
      columns, [&](int, std::int32_t column) { sum = fmaf(vector[column], vector[column], sum); });
  return 1.0f / sqrtf(simt::warp_sum(sum) + 1e-6f);
}

// Grid: x is the item, y the head, z shares the rows.
__global__ void gated_delta_kernel(GatedDeltaParams p) {
  const RecurrentItem item = p.items[blockIdx.x];
  const std::int32_t head = blockIdx.y, columns = p.states.columns;
  const std::int32_t key_head = head / (p.states.num_heads / p.num_key_heads);
  for (std::int32_t row = first_state_row(); row < p.states.rows; row += state_row_step()) {
    StateRow state = load_state_row(p.states, item.source, head, row);
    for (std::int32_t n = 0; n < item.num_tokens; ++n) {
      const std::int64_t token = item.first_token + n, at = token * p.states.num_heads + head;
      const float* k = p.k + (token * p.num_key_heads + key_head) * columns;
      const float* q = p.q + (token * p.num_key_heads + key_head) * columns;
      const float k_factor = p.normalise ? reciprocal_length(k, columns) : 1.0f;
      const float q_factor = p.normalise ? reciprocal_length(q, columns) : 1.0f;
      const float decay = exp_nonpositive(p.g[at]);
      for (float& value : state.values) value *= decay;
      const float read_back = dot_with_row(state, k, columns) * k_factor;
      const float change = (p.v[at * p.states.rows + row] - read_back) * p.beta[at];
      for_own_columns(columns, [&](int i, std::int32_t column) {
        state.values[i] = fmaf(change, k[column] * k_factor, state.values[i]);
      });
      const float o = dot_with_row(state, q, columns) * (q_factor * p.scale);
      if (threadIdx.x % 32 == 0) p.o[at * p.states.rows + row] = o;
      store_state_row(p.states, state_target(p.state_targets, item, n), head, row, state);
    }
  }
}

}  // namespace SIMT_VARIANT
}  // namespace lockstep::cuda
