// The selective state update of Mamba2, for chunks, single tokens and speculative tokens: each warp
// carries one row of a head's state over the tokens of a request.
//
// Tolerance, in units of u = 2^-24 and relative to sums of absolute values. dt is within 16, so a
// decay exp(A dt) within 5 + 18 |A dt|, and the fmaf that applies it adds 1; what a token adds,
// dt x B, is within 20. So a state is within T + 20, T = sum over its tokens of 6 + 18 |A dt|, and
// y = h C + D x within T + 30 + columns / 32, times its gate within 24 more (advance() of
// tests/cuda_backend/recurrence_oracle.h). A stored state is rounded once more to its dtype.
#pragma once

#include "cuda_backend/kernels/activations.cuh"
#include "cuda_backend/kernels/state_rows.cuh"

namespace lockstep::cuda {
namespace SIMT_VARIANT {

// Grid: x is the item, y the head, z shares the rows.
__global__ void selective_state_kernel(SelectiveStateParams p) {
  const RecurrentItem item = p.items[blockIdx.x];
  const std::int32_t head = blockIdx.y, columns = p.states.columns;
  const std::int32_t group = head / (p.states.num_heads / p.num_groups);
  for (std::int32_t row = first_state_row(); row < p.states.rows; row += state_row_step()) {
    StateRow state = load_state_row(p.states, item.source, head, row);
    for (std::int32_t n = 0; n < item.num_tokens; ++n) {
      const std::int64_t token = item.first_token + n, at = token * p.states.num_heads + head;
      const float dt = softplus(p.dt[at] + p.dt_bias[head]);
      const float decay = exp_nonpositive(p.A[head] * dt), x = p.x[at * p.states.rows + row];
      const float* B = p.B + (token * p.num_groups + group) * columns;
      const float* C = p.C + (token * p.num_groups + group) * columns;
      for_own_columns(columns, [&](int i, std::int32_t column) {
        state.values[i] = fmaf(state.values[i], decay, dt * x * B[column]);
      });
      const float y = fmaf(p.D[head], x, dot_with_row(state, C, columns));
      if (threadIdx.x % 32 == 0)
        p.y[at * p.states.rows + row] =
            p.z == nullptr ? y : y * silu(p.z[at * p.states.rows + row]);
      store_state_row(p.states, state_target(p.state_targets, item, n), head, row, state);
    }
  }
}

}  // namespace SIMT_VARIANT
}  // namespace lockstep::cuda
