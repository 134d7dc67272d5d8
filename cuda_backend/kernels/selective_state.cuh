// The selective state update of Mamba2, for chunks, single tokens and speculative tokens: each warp
// carries rows of a head's state over the tokens of a request.
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

// Grid: x is the item, y the head, z shares the rows, kRowsOfWarp to a warp.
template <int kPerLane>
__global__ void selective_state_kernel(SelectiveStateParams p) {
  const RecurrentItem item = p.items[blockIdx.x];
  WarpRows<kPerLane> rows(p.states, item.source);
  if (rows.count == 0) return;
  const std::int32_t head = rows.head, columns = p.states.columns;
  const std::int32_t group = head / (p.states.num_heads / p.num_groups);
  for (std::int32_t n = 0; n < item.num_tokens; ++n) {
    const std::int64_t token = item.first_token + n;
    const std::int64_t at = (token * p.states.num_heads + head) * p.states.rows + rows.first;
    const float dt = softplus(p.dt[token * p.states.num_heads + head] + p.dt_bias[head]);
    const float decay = exp_nonpositive(p.A[head] * dt);
    const float* B = p.B + (token * p.num_groups + group) * columns;
    const float* C = p.C + (token * p.num_groups + group) * columns;
    float x[kRowsOfWarp], y[kRowsOfWarp];
    SIMT_UNROLL
    for (int i = 0; i < kRowsOfWarp; ++i) x[i] = i < rows.count ? p.x[at + i] : 0.0f;
    for_own_columns<kPerLane>(columns, [&](int k, std::int32_t column) {
      SIMT_UNROLL
      for (int i = 0; i < kRowsOfWarp; ++i)
        rows.rows[i].values[k] = fmaf(rows.rows[i].values[k], decay, dt * x[i] * B[column]);
    });
    rows.multiply(y, C, columns);
    simt::warp_sum_each(y);
    rows.by_lane([&](int i) {
      const float all = fmaf(p.D[head], x[i], y[i]);
      p.y[at + i] = p.z == nullptr ? all : all * silu(p.z[at + i]);
    });
    rows.store(p.states, state_target(p.state_targets, item, n));
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
  RowTile B, C;
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
  const std::int32_t columns = p.states.columns;
  const std::int64_t stride = std::int64_t(p.num_groups) * columns;
  const std::int64_t at = first * stride + std::int64_t(group) * columns;
  for (std::int32_t column = 0; column < columns; column += kTileColumns) {
    shared.B.load(p.B + at, stride, count, column, columns);
    shared.C.load(p.C + at, stride, count, column, columns);
    __syncthreads();
    const bool is_last = column + kTileColumns >= columns;
    for (std::int32_t i = threadIdx.x; i < count * count; i += blockDim.x) {
      const std::int32_t t = i / count, s = i - t * count;
      if (s > t) continue;
      float& weight = shared.weights[t * kPieceTokens + s];
      const float score =
          shared.C.product(column == 0 ? 0.0f : weight, t, shared.B, s, columns - column);
      weight = is_last
                   ? score * exp_nonpositive(shared.decayed[t] - shared.decayed[s]) * shared.dt[s]
                   : score;
    }
    __syncthreads();
  }
}

// Outputs of the rows over a piece, and the rows after it. A lane knows x of one token.
template <int kPerLane>
__device__ __forceinline__ void advance_rows(const SelectiveStateParams& p,
                                             const PieceShared& shared, WarpRows<kPerLane>& rows,
                                             std::int64_t first, std::int32_t count,
                                             std::int32_t group) {
  const std::int32_t lane = threadIdx.x % 32, columns = p.states.columns;
  const std::int64_t stride = std::int64_t(p.states.num_heads) * p.states.rows;
  const std::int64_t at = first * stride + std::int64_t(rows.head) * p.states.rows + rows.first;
  float own_x[kRowsOfWarp];
  SIMT_UNROLL
  for (int i = 0; i < kRowsOfWarp; ++i)
    own_x[i] = lane < count && i < rows.count ? p.x[at + lane * stride + i] : 0.0f;
  for (std::int32_t t = 0; t < count; ++t) {
    const float* C = p.C + ((first + t) * p.num_groups + group) * columns;
    const float decay = exp_nonpositive(shared.decayed[t]);
    const float weight = lane <= t ? shared.weights[t * kPieceTokens + lane] : 0.0f;
    float sums[kRowsOfWarp];
    rows.multiply(sums, C, columns);
    SIMT_UNROLL
    for (int i = 0; i < kRowsOfWarp; ++i) {
      sums[i] *= decay;
      if (lane <= t) sums[i] = fmaf(weight, own_x[i], sums[i]);
    }
    simt::warp_sum_each(sums);
    if (lane != t) continue;
    SIMT_UNROLL
    for (int i = 0; i < kRowsOfWarp; ++i) {
      if (i >= rows.count) break;
      const float y = fmaf(p.D[rows.head], own_x[i], sums[i]);
      p.y[at + t * stride + i] = p.z == nullptr ? y : y * silu(p.z[at + t * stride + i]);
    }
  }
  const float total = shared.decayed[count - 1];
  rows.decay(exp_nonpositive(total));
  for (std::int32_t s = 0; s < count; ++s) {
    const float* B = p.B + ((first + s) * p.num_groups + group) * columns;
    const float weight = exp_nonpositive(total - shared.decayed[s]) * shared.dt[s];
    float added[kRowsOfWarp];
    SIMT_UNROLL
    for (int i = 0; i < kRowsOfWarp; ++i)
      added[i] = i < rows.count ? weight * p.x[at + s * stride + i] : 0.0f;
    rows.add(added, B, 1.0f, columns);
  }
}

// Calls advance(shared, rows, first, count, group) for the rows of each warp and each prepared
// piece of the CTA's item. Grid: as selective_state_kernel.
template <int kPerLane, class Advance>
__device__ __forceinline__ void for_each_selective_piece(const SelectiveStateParams& p,
                                                         const Advance& advance) {
  SIMT_SHARED_ARRAY(float, dt, kPieceTokens);
  SIMT_SHARED_ARRAY(float, decayed, kPieceTokens);
  SIMT_SHARED_ARRAY(float, weights, kPieceTokens* kPieceTokens);
  SIMT_SHARED_ARRAY(float, B_tile, kPieceTokens* kTileStride);
  SIMT_SHARED_ARRAY(float, C_tile, kPieceTokens* kTileStride);
  const PieceShared shared{dt, decayed, weights, {B_tile}, {C_tile}};
  const std::int32_t head = blockIdx.y, group = head / (p.states.num_heads / p.num_groups);
  for_each_piece<kPerLane>(
      p.states, p.items[blockIdx.x], p.state_targets,
      [&](std::int32_t first, std::int32_t count) {
        prepare_piece(p, shared, first, count, head, group);
      },
      [&](WarpRows<kPerLane>& rows, std::int32_t first, std::int32_t count) {
        advance(shared, rows, first, count, group);
      });
}

template <int kPerLane>
__global__ void selective_chunks_kernel(SelectiveStateParams p) {
  for_each_selective_piece<kPerLane>(
      p, [&](const PieceShared& shared, WarpRows<kPerLane>& rows, std::int32_t first,
             std::int32_t count,
             std::int32_t group) { advance_rows(p, shared, rows, first, count, group); });
}

}  // namespace SIMT_VARIANT
}  // namespace lockstep::cuda
