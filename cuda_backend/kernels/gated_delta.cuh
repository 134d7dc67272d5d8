// The gated delta rule (Qwen3-Next's linear attention), for chunks, single tokens and speculative
// tokens: each warp carries rows of a head's state over the tokens of a request.
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

// 1 / |vector| of two vectors, with the 1e-6 that vLLM adds to the squares.
template <int kPerLane>
__device__ __forceinline__ void reciprocal_lengths(float (&lengths)[2], const float* a,
                                                   const float* b, std::int32_t columns) {
  lengths[0] = lengths[1] = 0.0f;
  for_own_columns<kPerLane>(columns, [&](int, std::int32_t column) {
    lengths[0] = fmaf(a[column], a[column], lengths[0]);
    lengths[1] = fmaf(b[column], b[column], lengths[1]);
  });
  simt::warp_sum_each(lengths);
  SIMT_UNROLL
  for (float& length : lengths) length = 1.0f / sqrtf(length + 1e-6f);
}

// Grid: x is the item, y the head, z shares the rows, kRowsOfWarp to a warp.
template <int kPerLane>
__global__ void gated_delta_kernel(GatedDeltaParams p) {
  const RecurrentItem item = p.items[blockIdx.x];
  WarpRows<kPerLane> rows(p.states, item.source);
  if (rows.count == 0) return;
  const std::int32_t head = rows.head, columns = p.states.columns;
  const std::int32_t key_head = head / (p.states.num_heads / p.num_key_heads);
  for (std::int32_t n = 0; n < item.num_tokens; ++n) {
    const std::int64_t token = item.first_token + n, of_head = token * p.states.num_heads + head;
    const std::int64_t at = of_head * p.states.rows + rows.first;
    const float* k = p.k + (token * p.num_key_heads + key_head) * columns;
    const float* q = p.q + (token * p.num_key_heads + key_head) * columns;
    float factors[2] = {1.0f, 1.0f};  // of k and q
    if (p.normalise) reciprocal_lengths<kPerLane>(factors, k, q, columns);
    rows.decay(exp_nonpositive(p.g[of_head]));
    float changes[kRowsOfWarp], outputs[kRowsOfWarp];
    rows.multiply(changes, k, columns);
    simt::warp_sum_each(changes);
    SIMT_UNROLL
    for (int i = 0; i < kRowsOfWarp; ++i)
      changes[i] =
          i < rows.count ? (p.v[at + i] - changes[i] * factors[0]) * p.beta[of_head] : 0.0f;
    rows.add(changes, k, factors[0], columns);
    rows.multiply(outputs, q, columns);
    simt::warp_sum_each(outputs);
    rows.by_lane([&](int i) { p.o[at + i] = outputs[i] * (factors[1] * p.scale); });
    rows.store(p.states, state_target(p.state_targets, item, n));
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
  RowTile k, q;
};

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
  if (threadIdx.x == 0) {
    float sum = 0.0f;
    for (std::int32_t t = 0; t < count; ++t) {
      sum += p.g[(piece.first + t) * p.states.num_heads + piece.head];
      shared.decayed[t] = sum;
    }
  }
  for (std::int32_t column = 0; column < columns; column += kTileColumns) {
    shared.k.load(piece.k, piece.stride, count, column, columns);
    shared.q.load(piece.q, piece.stride, count, column, columns);
    __syncthreads();
    const std::int32_t left = columns - column;
    for (std::int32_t i = threadIdx.x; i < count * count; i += blockDim.x) {
      const std::int32_t t = i / count, s = i - t * count;
      if (s > t) continue;
      float& read = shared.read[t * kPieceTokens + s];
      float& shown = shared.shown[t * kPieceTokens + s];
      read = shared.k.product(column == 0 ? 0.0f : read, t, shared.k, s, left);
      shown = shared.q.product(column == 0 ? 0.0f : shown, t, shared.k, s, left);
    }
    for (std::int32_t t = threadIdx.x; t < count; t += blockDim.x)
      shared.q_factor[t] =
          shared.q.product(column == 0 ? 0.0f : shared.q_factor[t], t, shared.q, t, left);
    __syncthreads();
  }
  for (std::int32_t t = threadIdx.x; t < count; t += blockDim.x) {
    const float k_square = shared.read[t * kPieceTokens + t], q_square = shared.q_factor[t];
    shared.k_factor[t] = p.normalise ? 1.0f / sqrtf(k_square + 1e-6f) : 1.0f;
    shared.q_factor[t] = p.normalise ? p.scale / sqrtf(q_square + 1e-6f) : p.scale;
  }
  __syncthreads();
  for (std::int32_t i = threadIdx.x; i < count * count; i += blockDim.x) {
    const std::int32_t t = i / count, s = i - t * count;
    if (s > t) continue;
    const float decay = exp_nonpositive(shared.decayed[t] - shared.decayed[s]) * shared.k_factor[s];
    float& read = shared.read[t * kPieceTokens + s];
    float& shown = shared.shown[t * kPieceTokens + s];
    read = read * shared.k_factor[t] * decay;
    shown = shown * shared.q_factor[t] * decay;
  }
  __syncthreads();
}

// The rows' elements of v at token `threadIdx.x % 32` of the piece.
template <int kPerLane>
__device__ __forceinline__ void own_values(float (&v)[kRowsOfWarp], const GatedDeltaParams& p,
                                           const DeltaPiece& piece,
                                           const WarpRows<kPerLane>& rows) {
  const std::int32_t lane = threadIdx.x % 32;
  const std::int64_t at = (piece.first + lane) * p.states.num_heads + piece.head;
  SIMT_UNROLL
  for (int i = 0; i < kRowsOfWarp; ++i)
    v[i] = lane < piece.count && i < rows.count ? p.v[at * p.states.rows + rows.first + i] : 0.0f;
}

// Computes the rows' changes, outputs and state. Lane n stands for token n and has its `v`.
template <int kPerLane>
__device__ __forceinline__ void advance_delta_rows(const GatedDeltaParams& p,
                                                   const DeltaShared& shared,
                                                   const DeltaPiece& piece,
                                                   WarpRows<kPerLane>& rows,
                                                   const float (&v)[kRowsOfWarp]) {
  const std::int32_t lane = threadIdx.x % 32, columns = p.states.columns;
  const std::int64_t at = (piece.first + lane) * p.states.num_heads + piece.head;
  const float beta = lane < piece.count ? p.beta[at] : 0.0f;
  float changes[kRowsOfWarp] = {}, sums[kRowsOfWarp];
  for (std::int32_t t = 0; t < piece.count; ++t) {
    const float factor = exp_nonpositive(shared.decayed[t]) * shared.k_factor[t];
    const float weight = lane < t ? shared.read[t * kPieceTokens + lane] : 0.0f;
    rows.multiply(sums, piece.k + t * piece.stride, columns);
    SIMT_UNROLL
    for (int i = 0; i < kRowsOfWarp; ++i) {
      sums[i] *= factor;
      if (lane < t) sums[i] = fmaf(weight, changes[i], sums[i]);
    }
    simt::warp_sum_each(sums);
    SIMT_UNROLL
    for (int i = 0; i < kRowsOfWarp; ++i)
      if (lane == t) changes[i] = (v[i] - sums[i]) * beta;
  }
  for (std::int32_t t = 0; t < piece.count; ++t) {
    const float factor = exp_nonpositive(shared.decayed[t]) * shared.q_factor[t];
    const float weight = lane <= t ? shared.shown[t * kPieceTokens + lane] : 0.0f;
    rows.multiply(sums, piece.q + t * piece.stride, columns);
    SIMT_UNROLL
    for (int i = 0; i < kRowsOfWarp; ++i) {
      sums[i] *= factor;
      if (lane <= t) sums[i] = fmaf(weight, changes[i], sums[i]);
    }
    simt::warp_sum_each(sums);
    if (lane != t) continue;
    SIMT_UNROLL
    for (int i = 0; i < kRowsOfWarp; ++i)
      if (i < rows.count) p.o[at * p.states.rows + rows.first + i] = sums[i];
  }
  const float total = shared.decayed[piece.count - 1];
  rows.decay(exp_nonpositive(total));
  for (std::int32_t s = 0; s < piece.count; ++s) {
    const float weight = exp_nonpositive(total - shared.decayed[s]) * shared.k_factor[s];
    float added[kRowsOfWarp];
    SIMT_UNROLL
    for (int i = 0; i < kRowsOfWarp; ++i) added[i] = changes[i];
    simt::warp_copy_each(added, s);
    SIMT_UNROLL
    for (float& one : added) one = weight * one;
    rows.add(added, piece.k + s * piece.stride, 1.0f, columns);
  }
}

// Calls advance(shared, piece, rows) for the rows of each warp and each prepared piece of the CTA's
// item. Grid: as gated_delta_kernel.
template <int kPerLane, class Advance>
__device__ __forceinline__ void for_each_delta_piece(const GatedDeltaParams& p,
                                                     const Advance& advance) {
  SIMT_SHARED_ARRAY(float, k_factor, kPieceTokens);
  SIMT_SHARED_ARRAY(float, q_factor, kPieceTokens);
  SIMT_SHARED_ARRAY(float, decayed, kPieceTokens);
  SIMT_SHARED_ARRAY(float, read, kPieceTokens* kPieceTokens);
  SIMT_SHARED_ARRAY(float, shown, kPieceTokens* kPieceTokens);
  SIMT_SHARED_ARRAY(float, k_tile, kPieceTokens* kTileStride);
  SIMT_SHARED_ARRAY(float, q_tile, kPieceTokens* kTileStride);
  const DeltaShared shared{k_factor, q_factor, decayed, read, shown, {k_tile}, {q_tile}};
  const std::int32_t head = blockIdx.y;
  for_each_piece<kPerLane>(
      p.states, p.items[blockIdx.x], p.state_targets,
      [&](std::int32_t first, std::int32_t count) {
        prepare_delta(p, shared, piece_at(p, first, count, head));
      },
      [&](WarpRows<kPerLane>& rows, std::int32_t first, std::int32_t count) {
        advance(shared, piece_at(p, first, count, head), rows);
      });
}

template <int kPerLane>
__global__ void delta_chunks_kernel(GatedDeltaParams p) {
  for_each_delta_piece<kPerLane>(
      p, [&](const DeltaShared& shared, const DeltaPiece& piece, WarpRows<kPerLane>& rows) {
        float v[kRowsOfWarp];
        own_values(v, p, piece, rows);
        advance_delta_rows(p, shared, piece, rows, v);
      });
}

}  // namespace SIMT_VARIANT
}  // namespace lockstep::cuda
