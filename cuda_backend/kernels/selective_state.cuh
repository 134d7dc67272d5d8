// The selective state update of Mamba2, for chunks, single tokens and speculative tokens: each warp
// carries one row of a head's state over the tokens of a request.
//
// Tolerance, in units of u = 2^-24 and relative to sums of absolute values. dt is within 16, so a
// decay exp(A dt) within 5 + 18 |A dt|, and the fmaf that applies it adds 1; what a token adds,
// dt x B, is within 20. So a state is within T + 20, T = sum over its tokens of 6 + 18 |A dt|, and
// y = h C + D x within T + 30 + columns / 32, times its gate within 24 more (advance() of
// tests/cuda_backend/recurrence_oracle.h). A stored state is also rounded to its dtype.
#pragma once

#include "cuda_backend/kernels/number_formats.cuh"
#include "cuda_backend/kernels/state_rows.cuh"

namespace lockstep::cuda {
namespace SIMT_VARIANT {

// Grid: x is the item, y the head, z shares the rows.
[[maybe_unused]] static __global__ void selective_state_kernel(SelectiveStateParams p) {
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

// Mamba2's update for long chunks, in the form of state space duality: a piece of up to 32 tokens
// is a masked product of C, B and the decays between tokens, computed once for all rows of a head,
// and the state moves on once for a piece. The same function as above.
//
// 1. Pieces end where a state is stored (for_each_piece()). 2. Rows belong to one warp, as there.
// 3. Tolerance, in units of u = 2^-24 and relative to sums of absolute values: the decay between
//    two tokens is one exponential of a difference of sums over at most 32 tokens, within
//    6 + (32 + 19) |sum A dt|; a weight is a chain of `columns` fmaf and an output adds 32 of them.
//    So T + columns + 62 for states and outputs, T = sum over the tokens of 6 + 51 |A dt|
//    (advance() of tests/cuda_backend/recurrence_oracle.h).

// What the CTA shares of a piece.
struct PieceShared {
  float* dt;       // [kPieceTokens], after bias and softplus
  float* decayed;  // [kPieceTokens]: A times the sum of dt up to the token
  float* weights;  // [kPieceTokens, kPieceTokens]: of x of token s in y of token t
};

// Computes dt, its sums and the weights. Called by every thread of the CTA; ends with a barrier.
__device__ __forceinline__ void prepare_piece(const SelectiveStateParams& p,
                                              const PieceShared& shared, std::int64_t first,
                                              std::int32_t count, std::int32_t head,
                                              std::int32_t group) {
  for (std::int32_t t = threadIdx.x; t < count; t += blockDim.x)
    shared.dt[t] = softplus(p.dt[(first + t) * p.states.num_heads + head] + p.dt_bias[head]);
  __syncthreads();
  if (threadIdx.x == 0) {
    float sum = 0.0f;
    for (std::int32_t t = 0; t < count; ++t) {
      sum = fmaf(p.A[head], shared.dt[t], sum);
      shared.decayed[t] = sum;
    }
  }
  __syncthreads();
  for (std::int32_t i = threadIdx.x; i < count * count; i += blockDim.x) {
    const std::int32_t t = i / count, s = i - t * count;
    if (s > t) continue;
    const float* C = p.C + ((first + t) * p.num_groups + group) * p.states.columns;
    const float* B = p.B + ((first + s) * p.num_groups + group) * p.states.columns;
    float score = 0.0f;
    for (std::int32_t column = 0; column < p.states.columns; ++column)
      score = fmaf(C[column], B[column], score);
    const float decay = exp_nonpositive(shared.decayed[t] - shared.decayed[s]);
    shared.weights[t * kPieceTokens + s] = score * decay * shared.dt[s];
  }
  __syncthreads();
}

// Outputs of one row over a piece, and the row's state after it. A lane knows x of one token.
__device__ __forceinline__ void advance_row(const SelectiveStateParams& p,
                                            const PieceShared& shared, StateRow& state,
                                            std::int64_t first, std::int32_t count,
                                            std::int32_t head, std::int32_t group,
                                            std::int32_t row) {
  const std::int32_t lane = threadIdx.x % 32, columns = p.states.columns;
  const std::int64_t stride = std::int64_t(p.states.num_heads) * p.states.rows;
  const std::int64_t at = first * stride + std::int64_t(head) * p.states.rows + row;
  const float own_x = lane < count ? p.x[at + lane * stride] : 0.0f;
  for (std::int32_t t = 0; t < count; ++t) {
    const float* C = p.C + ((first + t) * p.num_groups + group) * columns;
    float carried = 0.0f;
    for_own_columns(columns, [&](int i, std::int32_t column) {
      carried = fmaf(state.values[i], C[column], carried);
    });
    float part = carried * exp_nonpositive(shared.decayed[t]);
    if (lane <= t) part = fmaf(shared.weights[t * kPieceTokens + lane], own_x, part);
    const float sum = simt::warp_sum(part);
    if (lane != t) continue;
    const float y = fmaf(p.D[head], own_x, sum);
    p.y[at + t * stride] = p.z == nullptr ? y : y * silu(p.z[at + t * stride]);
  }
  const float total = shared.decayed[count - 1], decay = exp_nonpositive(total);
  for (float& value : state.values) value *= decay;
  for (std::int32_t s = 0; s < count; ++s) {
    const float* B = p.B + ((first + s) * p.num_groups + group) * columns;
    const float added =
        exp_nonpositive(total - shared.decayed[s]) * shared.dt[s] * p.x[at + s * stride];
    for_own_columns(columns, [&](int i, std::int32_t column) {
      state.values[i] = fmaf(added, B[column], state.values[i]);
    });
  }
}

// Calls advance(shared, state, first, count, head, group, row) for each row of each prepared piece
// of the CTA's item. Grid: x is the item, y the head, z shares the rows, kRowsOfWarp to a warp.
template <class Advance>
__device__ __forceinline__ void for_each_selective_row(const SelectiveStateParams& p,
                                                       const Advance& advance) {
  SIMT_SHARED_ARRAY(float, dt, kPieceTokens);
  SIMT_SHARED_ARRAY(float, decayed, kPieceTokens);
  SIMT_SHARED_ARRAY(float, weights, kPieceTokens* kPieceTokens);
  const PieceShared shared{dt, decayed, weights};
  const std::int32_t head = blockIdx.y, group = head / (p.states.num_heads / p.num_groups);
  for_each_piece(
      p.states, p.items[blockIdx.x], p.state_targets,
      [&](std::int32_t first, std::int32_t count) {
        prepare_piece(p, shared, first, count, head, group);
      },
      [&](StateRow& state, std::int32_t row, std::int32_t first, std::int32_t count) {
        advance(shared, state, first, count, head, group, row);
      });
}

[[maybe_unused]] static __global__ void selective_chunks_kernel(SelectiveStateParams p) {
  for_each_selective_row(
      p, [&](const PieceShared& shared, StateRow& state, std::int32_t first, std::int32_t count,
             std::int32_t head, std::int32_t group,
             std::int32_t row) { advance_row(p, shared, state, first, count, head, group, row); });
}

}  // namespace SIMT_VARIANT
}  // namespace lockstep::cuda
