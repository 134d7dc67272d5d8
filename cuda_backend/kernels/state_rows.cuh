// Rows of a recurrent state in the registers of a warp: each lane holds every 32nd column. Read
// from a block, advanced token by token in fp32, and written to the block that a token names. A
// warp has several rows, whose loads and reductions overlap.
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

// kPerLane columns of a lane: of a row of up to 32 kPerLane.
template <int kPerLane>
struct StateRow {
  float values[kPerLane];
};

// Applies `each(index, column)` to the columns of this lane.
template <int kPerLane, class Each>
__device__ __forceinline__ void for_own_columns(std::int32_t columns, const Each& each) {
  SIMT_UNROLL
  for (int i = 0; i < kPerLane; ++i) {
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

// A state's numbers have 4 or 2 bytes.
template <int kPerLane>
__device__ __forceinline__ StateRow<kPerLane> load_state_row(const RecurrentStates& states,
                                                             std::int32_t block, std::int32_t head,
                                                             std::int32_t row) {
  StateRow<kPerLane> state{};
  if (block == 0) return state;
  const std::byte* at = state_row_at(states, block, head, row);
  const bool is_fp32 = states.dtype == DType::fp32;
  for_own_columns<kPerLane>(states.columns, [&](int i, std::int32_t column) {
    state.values[i] =
        is_fp32 ? reinterpret_cast<const float*>(at)[column]
                : element<2>(reinterpret_cast<const std::uint16_t*>(at)[column], 0, states.dtype);
  });
  return state;
}

template <int kPerLane>
__device__ __forceinline__ void store_state_row(const RecurrentStates& states, std::int32_t block,
                                                std::int32_t head, std::int32_t row,
                                                const StateRow<kPerLane>& state) {
  if (block == 0) return;
  std::byte* at = state_row_at(states, block, head, row);
  for_own_columns<kPerLane>(states.columns, [&](int i, std::int32_t column) {
    const float value = state.values[i];
    if (states.dtype == DType::fp32)
      reinterpret_cast<float*>(at)[column] = value;
    else
      reinterpret_cast<std::uint16_t*>(at)[column] =
          std::uint16_t(states.dtype == DType::bf16 ? to_bf16(value) : to_fp16(value));
  });
}

// The block that the state goes to after token `n` of an item.
__device__ __forceinline__ std::int32_t state_target(const std::int32_t* state_targets,
                                                     const RecurrentItem& item, std::int32_t n) {
  return state_targets[item.first_token + n];
}

// The lane's part of a product with a vector of columns.
template <int kPerLane>
__device__ __forceinline__ float own_product(const StateRow<kPerLane>& state, const float* vector,
                                             std::int32_t columns) {
  float sum = 0.0f;
  for_own_columns<kPerLane>(columns, [&](int i, std::int32_t column) {
    sum = fmaf(state.values[i], vector[column], sum);
  });
  return sum;
}

inline constexpr std::int32_t kRowsOfWarp = 4;

// The rows of a head that a warp has: kRowsOfWarp of them from `first` on, or fewer at the end. The
// warps of all CTAs along z share a head.
template <int kPerLane>
struct WarpRows {
  std::int32_t head, first, count;
  StateRow<kPerLane> rows[kRowsOfWarp];

  __device__ __forceinline__ WarpRows(const RecurrentStates& states, std::int32_t source)
      : head(blockIdx.y),
        first(std::int32_t(blockIdx.z * (blockDim.x / 32) + threadIdx.x / 32) * kRowsOfWarp) {
    const std::int32_t left = states.rows - first;
    count = left < 0 ? 0 : left < kRowsOfWarp ? left : kRowsOfWarp;
    SIMT_UNROLL
    for (int i = 0; i < kRowsOfWarp; ++i)
      if (i < count)
        rows[i] = load_state_row<kPerLane>(states, source, head, first + i);
      else
        rows[i] = {};
  }
  __device__ __forceinline__ void store(const RecurrentStates& states, std::int32_t block) const {
    SIMT_UNROLL
    for (int i = 0; i < kRowsOfWarp; ++i)
      if (i < count) store_state_row(states, block, head, first + i, rows[i]);
  }
  __device__ __forceinline__ void decay(float factor) {
    SIMT_UNROLL
    for (StateRow<kPerLane>& row : rows)
      for (float& value : row.values) value *= factor;
  }
  // Adds factors[i] times a vector of columns to row i.
  __device__ __forceinline__ void add(const float (&factors)[kRowsOfWarp], const float* vector,
                                      float factor, std::int32_t columns) {
    for_own_columns<kPerLane>(columns, [&](int k, std::int32_t column) {
      const float value = vector[column] * factor;
      SIMT_UNROLL
      for (int i = 0; i < kRowsOfWarp; ++i)
        rows[i].values[k] = fmaf(factors[i], value, rows[i].values[k]);
    });
  }
  // The lane's parts of products with a vector of columns.
  __device__ __forceinline__ void multiply(float (&products)[kRowsOfWarp], const float* vector,
                                           std::int32_t columns) const {
    SIMT_UNROLL
    for (int i = 0; i < kRowsOfWarp; ++i) products[i] = own_product(rows[i], vector, columns);
  }
  // Calls `each(i)` for the rows, one of them in each of the first lanes.
  template <class Each>
  __device__ __forceinline__ void by_lane(const Each& each) const {
    SIMT_UNROLL
    for (int i = 0; i < kRowsOfWarp; ++i)
      if (i < count && std::int32_t(threadIdx.x % 32) == i) each(i);
  }
};

// How the chunked forms of recurrences cut a request's tokens: pieces of at most 32 tokens, one to
// a lane, that end where a token has a state target. So a state is stored at exactly its token,
// whatever multiple of 32 that is (vLLM issue 34798).
inline constexpr std::int32_t kPieceTokens = 32;

// Columns [first, first + kTileColumns) of the rows of a piece's tokens, in shared memory: threads
// that read one column of 32 rows use all banks.
inline constexpr std::int32_t kTileColumns = 64, kTileStride = kTileColumns + 1;
struct RowTile {
  float* values;  // [kPieceTokens, kTileStride]

  __device__ __forceinline__ void load(const float* rows, std::int64_t stride, std::int32_t count,
                                       std::int32_t first, std::int32_t columns) const {
    for (std::int32_t i = threadIdx.x; i < count * kTileColumns; i += blockDim.x) {
      const std::int32_t row = i / kTileColumns, column = first + i % kTileColumns;
      if (column < columns)
        values[row * kTileStride + column - first] = rows[row * stride + column];
    }
  }
  // A product of two rows, the columns of this tile added to those of the tiles before it.
  __device__ __forceinline__ float product(float before, std::int32_t row, const RowTile& other,
                                           std::int32_t other_row, std::int32_t left) const {
    const float *a = values + row * kTileStride, *b = other.values + other_row * kTileStride;
    const std::int32_t columns = left < kTileColumns ? left : kTileColumns;
    for (std::int32_t column = 0; column < columns; ++column)
      before = fmaf(a[column], b[column], before);
    return before;
  }
};

// Tokens from `first` up to the end, the next stored state or a full piece, whichever is first.
__device__ __forceinline__ std::int32_t tokens_of_piece(const std::int32_t* state_targets,
                                                        std::int32_t first, std::int32_t end) {
  std::int32_t count = 0;
  while (first + count < end && count < kPieceTokens)
    if (state_targets[first + count++] != 0) break;
  return count;
}

// Carries the rows of this warp over all pieces of an item. `prepare(first, count)` is called by
// every thread of the CTA and ends with a barrier; `advance(rows, first, count)` by every warp that
// has rows.
template <int kPerLane, class Prepare, class Advance>
__device__ __forceinline__ void for_each_piece(const RecurrentStates& states,
                                               const RecurrentItem& item,
                                               const std::int32_t* state_targets,
                                               const Prepare& prepare, const Advance& advance) {
  WarpRows<kPerLane> rows(states, item.source);
  const std::int32_t end = item.first_token + item.num_tokens;
  for (std::int32_t first = item.first_token, count = 0; first < end; first += count) {
    count = tokens_of_piece(state_targets, first, end);
    prepare(first, count);
    if (rows.count > 0) advance(rows, first, count);
    rows.store(states, state_targets[first + count - 1]);
    __syncthreads();
  }
}

}  // namespace SIMT_VARIANT
}  // namespace lockstep::cuda
