// The gated delta rule (Qwen3-Next's linear attention), for chunks, single tokens and speculative
// tokens: each warp carries one row of a head's state over the tokens of a request.
//
// Tolerance, in units of u = 2^-24, of the length of the row's error. What a token reads back
// (h k) feeds into the state again, but |k| <= 1 and beta <= 1 keep that map from growing anything,
// so errors add up: a token adds 6 + |g| + 2 (columns / 32 + 8) + 4 (columns / 64 + 6) times
// |h| + |v|, which are the decay, two sums over columns and the lengths of k. An output is off by
// |q| times the error, and by its own sum (advance() of tests/cuda_backend/recurrence_oracle.h). A
// stored state is also rounded to its dtype.
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
[[maybe_unused]] static __global__ void gated_delta_kernel(GatedDeltaParams p) {
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

// The gated delta rule for long chunks: within a piece of up to 32 tokens, products of keys with
// keys and of queries with keys are computed once for all rows of a head; each row then solves for
// what its tokens change, by forward substitution, and its state moves on once for a piece. The
// same function as above.
//
// 1. Pieces end where a state is stored (for_each_piece()). 2. Rows belong to one warp, as there.
// 3. Tolerance, in units of u = 2^-24: as there, errors of tokens add up, but what a token reads is
//    a sum over the piece, off by 2 columns + 100 + 40 sum |g| (two chains over columns, lengths of
//    two keys, a decay over up to 32 tokens) times |h| + sum |u|, the state before it and the
//    changes u so far (advance() of tests/cuda_backend/recurrence_oracle.h).

// What the CTA shares of a piece.
struct DeltaShared {
  float* k_factor;  // [kPieceTokens]: to length one, or 1
  float* q_factor;  // [kPieceTokens]: the scale of outputs included
  float* decayed;   // [kPieceTokens]: the sum of g up to the token
  float* read;      // [kPieceTokens, kPieceTokens]: of token s's change, as token t reads it back
  float* shown;     // [kPieceTokens, kPieceTokens]: the same in token t's output
};

__device__ __forceinline__ float dot_in_order(const float* a, const float* b,
                                              std::int32_t columns) {
  float sum = 0.0f;
  for (std::int32_t column = 0; column < columns; ++column) sum = fmaf(a[column], b[column], sum);
  return sum;
}

struct DeltaPiece {
  const float* k;  // of the first token; rows of num_key_heads * columns
  const float* q;
  std::int64_t stride;
  std::int64_t first;
  std::int32_t count, head;
};
__device__ __forceinline__ DeltaPiece piece_at(const GatedDeltaParams& p, std::int64_t first,
                                               std::int32_t count, std::int32_t head) {
  const std::int32_t key_head = head / (p.states.num_heads / p.num_key_heads);
  const std::int64_t stride = std::int64_t(p.num_key_heads) * p.states.columns;
  const std::int64_t at = first * stride + std::int64_t(key_head) * p.states.columns;
  return {p.k + at, p.q + at, stride, first, count, head};
}

// Called by every thread of the CTA; ends with a barrier.
__device__ __forceinline__ void prepare_delta(const GatedDeltaParams& p, const DeltaShared& shared,
                                              const DeltaPiece& piece) {
  const std::int32_t columns = p.states.columns, count = piece.count;
  for (std::int32_t t = threadIdx.x; t < count; t += blockDim.x) {
    const float *k = piece.k + t * piece.stride, *q = piece.q + t * piece.stride;
    shared.k_factor[t] = p.normalise ? 1.0f / sqrtf(dot_in_order(k, k, columns) + 1e-6f) : 1.0f;
    shared.q_factor[t] =
        p.normalise ? p.scale / sqrtf(dot_in_order(q, q, columns) + 1e-6f) : p.scale;
  }
  if (threadIdx.x == 0) {
    float sum = 0.0f;
    for (std::int32_t t = 0; t < count; ++t) {
      sum += p.g[(piece.first + t) * p.states.num_heads + piece.head];
      shared.decayed[t] = sum;
    }
  }
  __syncthreads();
  for (std::int32_t i = threadIdx.x; i < count * count; i += blockDim.x) {
    const std::int32_t t = i / count, s = i - t * count;
    if (s > t) continue;
    const float* k = piece.k + s * piece.stride;
    const float decay = exp_nonpositive(shared.decayed[t] - shared.decayed[s]) * shared.k_factor[s];
    const float key = dot_in_order(piece.k + t * piece.stride, k, columns) * shared.k_factor[t];
    const float query = dot_in_order(piece.q + t * piece.stride, k, columns) * shared.q_factor[t];
    shared.read[t * kPieceTokens + s] = key * decay;
    shared.shown[t * kPieceTokens + s] = query * decay;
  }
  __syncthreads();
}

// The row's element of v at token `threadIdx.x % 32` of the piece.
__device__ __forceinline__ float own_value(const GatedDeltaParams& p, const DeltaPiece& piece,
                                           std::int32_t row) {
  const std::int32_t lane = threadIdx.x % 32;
  const std::int64_t at = (piece.first + lane) * p.states.num_heads + piece.head;
  return lane < piece.count ? p.v[at * p.states.rows + row] : 0.0f;
}

// Computes the row's changes, outputs and state. Lane n stands for token n and has its `v`.
__device__ __forceinline__ void advance_delta_row(const GatedDeltaParams& p,
                                                  const DeltaShared& shared,
                                                  const DeltaPiece& piece, StateRow& state,
                                                  std::int32_t row, float v) {
  const std::int32_t lane = threadIdx.x % 32, columns = p.states.columns;
  const std::int64_t at = (piece.first + lane) * p.states.num_heads + piece.head;
  const float beta = lane < piece.count ? p.beta[at] : 0.0f;
  const auto product = [&](const float* vector) {
    float sum = 0.0f;
    for_own_columns(columns, [&](int i, std::int32_t column) {
      sum = fmaf(state.values[i], vector[column], sum);
    });
    return sum;
  };
  float change = 0.0f;
  for (std::int32_t t = 0; t < piece.count; ++t) {
    float part = product(piece.k + t * piece.stride) *
                 (exp_nonpositive(shared.decayed[t]) * shared.k_factor[t]);
    if (lane < t) part = fmaf(shared.read[t * kPieceTokens + lane], change, part);
    const float read_back = simt::warp_sum(part);
    if (lane == t) change = (v - read_back) * beta;
  }
  for (std::int32_t t = 0; t < piece.count; ++t) {
    float part = product(piece.q + t * piece.stride) *
                 (exp_nonpositive(shared.decayed[t]) * shared.q_factor[t]);
    if (lane <= t) part = fmaf(shared.shown[t * kPieceTokens + lane], change, part);
    const float o = simt::warp_sum(part);
    if (lane == t) p.o[at * p.states.rows + row] = o;
  }
  const float total = shared.decayed[piece.count - 1], decay = exp_nonpositive(total);
  for (float& value : state.values) value *= decay;
  for (std::int32_t s = 0; s < piece.count; ++s) {
    const float added = exp_nonpositive(total - shared.decayed[s]) * shared.k_factor[s] *
                        __shfl_sync(0xffffffffu, change, s);
    const float* k = piece.k + s * piece.stride;
    for_own_columns(columns, [&](int i, std::int32_t column) {
      state.values[i] = fmaf(added, k[column], state.values[i]);
    });
  }
}

// Calls advance(shared, piece, state, row) for each row of each prepared piece of the CTA's item.
// Grid: x is the item, y the head, z shares the rows, kRowsOfWarp to a warp.
template <class Advance>
__device__ __forceinline__ void for_each_delta_row(const GatedDeltaParams& p,
                                                   const Advance& advance) {
  SIMT_SHARED_ARRAY(float, k_factor, kPieceTokens);
  SIMT_SHARED_ARRAY(float, q_factor, kPieceTokens);
  SIMT_SHARED_ARRAY(float, decayed, kPieceTokens);
  SIMT_SHARED_ARRAY(float, read, kPieceTokens* kPieceTokens);
  SIMT_SHARED_ARRAY(float, shown, kPieceTokens* kPieceTokens);
  const DeltaShared shared{k_factor, q_factor, decayed, read, shown};
  const std::int32_t head = blockIdx.y;
  for_each_piece(
      p.states, p.items[blockIdx.x], p.state_targets,
      [&](std::int32_t first, std::int32_t count) {
        prepare_delta(p, shared, piece_at(p, first, count, head));
      },
      [&](StateRow& state, std::int32_t row, std::int32_t first, std::int32_t count) {
        advance(shared, piece_at(p, first, count, head), state, row);
      });
}

[[maybe_unused]] static __global__ void delta_chunks_kernel(GatedDeltaParams p) {
  for_each_delta_row(p, [&](const DeltaShared& shared, const DeltaPiece& piece, StateRow& state,
                            std::int32_t row) {
    advance_delta_row(p, shared, piece, state, row, own_value(p, piece, row));
  });
}

}  // namespace SIMT_VARIANT
}  // namespace lockstep::cuda
