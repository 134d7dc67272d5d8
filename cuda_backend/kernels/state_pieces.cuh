// How the chunked forms of recurrences cut a request's tokens: pieces of at most 32 tokens, one to
// a lane, that end where a token has a state target. So a state is stored at exactly its token,
// whatever multiple of 32 that is (vLLM issue 34798).
#pragma once

#include "cuda_backend/kernels/state_rows.cuh"

namespace lockstep::cuda {
namespace SIMT_VARIANT {

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
