// One row of a recurrent state in the registers of a warp: each lane holds every 32nd column. Read
// from a block, advanced token by token in fp32, and written to the block that a token names.
//
// 1. A row belongs to one warp, so a state that is read and written in one block has nothing to
//    race with. 2. Block 0 is the zero state as a source; as a target it is none.
// 3. The state is rounded to its dtype where it is written, not between tokens.
#pragma once

#include "cuda_backend/kernels/engine_params.h"
#include "cuda_backend/kernels/number_formats.cuh"

namespace lockstep::cuda {
namespace SIMT_VARIANT {

inline constexpr std::int32_t kMaxStateColumns = 256;

struct StateRow {
  static constexpr int kPerLane = kMaxStateColumns / 32;
  float values[kPerLane];
};

// Applies `each(index, column)` to the columns of this lane.
template <class Each>
__device__ __forceinline__ void for_own_columns(std::int32_t columns, const Each& each) {
  SIMT_UNROLL
  for (int i = 0; i < StateRow::kPerLane; ++i) {
    const std::int32_t column = std::int32_t(threadIdx.x % 32) + 32 * i;
    if (column < columns) each(i, column);
  }
}

__device__ __forceinline__ std::byte* state_row_at(const RecurrentStates& states,
                                                   std::int64_t block, std::int32_t head,
                                                   std::int32_t row) {
  return states.base + block * states.page_stride +
         (std::int64_t(head) * states.rows + row) * states.columns * element_bytes(states.dtype);
}

__device__ __forceinline__ StateRow load_state_row(const RecurrentStates& states,
                                                   std::int32_t block, std::int32_t head,
                                                   std::int32_t row) {
  StateRow state{};
  if (block == 0) return state;
  const std::byte* at = state_row_at(states, block, head, row);
  for_own_columns(states.columns, [&](int i, std::int32_t column) {
    state.values[i] =
        load_number(at + std::int64_t(column) * element_bytes(states.dtype), states.dtype);
  });
  return state;
}

__device__ __forceinline__ void store_state_row(const RecurrentStates& states, std::int32_t block,
                                                std::int32_t head, std::int32_t row,
                                                const StateRow& state) {
  if (block == 0) return;
  std::byte* at = state_row_at(states, block, head, row);
  for_own_columns(states.columns, [&](int i, std::int32_t column) {
    store_number(at + std::int64_t(column) * element_bytes(states.dtype), state.values[i],
                 states.dtype);
  });
}

// The block that the state goes to after token `n` of an item.
__device__ __forceinline__ std::int32_t state_target(const std::int32_t* state_targets,
                                                     const RecurrentItem& item, std::int32_t n) {
  return state_targets[item.first_token + n];
}

// Lane by lane product with a vector of columns, added up over the warp.
__device__ __forceinline__ float dot_with_row(const StateRow& state, const float* vector,
                                              std::int32_t columns) {
  float sum = 0.0f;
  for_own_columns(columns, [&](int i, std::int32_t column) {
    sum = fmaf(state.values[i], vector[column], sum);
  });
  return simt::warp_sum(sum);
}

// Rows of a head are shared by the warps of all CTAs along z.
__device__ __forceinline__ std::int32_t first_state_row() {
  return std::int32_t(blockIdx.z * (blockDim.x / 32) + threadIdx.x / 32);
}
__device__ __forceinline__ std::int32_t state_row_step() {
  return std::int32_t(gridDim.z * (blockDim.x / 32));
}

// How the chunked forms of recurrences cut a request's tokens: pieces of at most 32 tokens, one to
// a lane, that end where a token has a state target. So a state is stored at exactly its token,
// whatever multiple of 32 that is (vLLM issue 34798).
inline constexpr std::int32_t kPieceTokens = 32;
inline constexpr std::int32_t kRowsOfWarp = 4;  // of the state, that a warp carries at once

// Tokens from `first` up to the end, the next stored state or a full piece, whichever is first.
__device__ __forceinline__ std::int32_t tokens_of_piece(const std::int32_t* state_targets,
                                                        std::int32_t first, std::int32_t end) {
  std::int32_t count = 0;
  while (first + count < end && count < kPieceTokens)
    if (state_targets[first + count++] != 0) break;
  return count;
}

// Carries the rows of this warp over all pieces of an item. `prepare(first, count)` is called by
// every thread of the CTA and ends with a barrier; `advance(state, row, first, count)` by the warp
// that owns the row.
template <class Prepare, class Advance>
__device__ __forceinline__ void for_each_piece(const RecurrentStates& states,
                                               const RecurrentItem& item,
                                               const std::int32_t* state_targets,
                                               const Prepare& prepare, const Advance& advance) {
  const std::int32_t head = blockIdx.y, first_row = first_state_row() * kRowsOfWarp;
  StateRow rows[kRowsOfWarp] = {};
  SIMT_UNROLL
  for (int i = 0; i < kRowsOfWarp; ++i)
    if (first_row + i < states.rows)
      rows[i] = load_state_row(states, item.source, head, first_row + i);
  const std::int32_t end = item.first_token + item.num_tokens;
  for (std::int32_t first = item.first_token, count = 0; first < end; first += count) {
    count = tokens_of_piece(state_targets, first, end);
    prepare(first, count);
    SIMT_UNROLL
    for (int i = 0; i < kRowsOfWarp; ++i) {
      if (first_row + i >= states.rows) continue;
      advance(rows[i], first_row + i, first, count);
      store_state_row(states, state_targets[first + count - 1], head, first_row + i, rows[i]);
    }
    __syncthreads();
  }
}

}  // namespace SIMT_VARIANT
}  // namespace lockstep::cuda
