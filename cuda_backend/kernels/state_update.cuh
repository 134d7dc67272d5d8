// Recurrent states (Mamba, linear attention) as words that every token advances: rule (2) of
// sim/protocol/backend.h. A word depends on all tokens so far, so a state that saw one token too
// many, too few or another's is wrong in every word.
//
// 1. source and target may be the same block: each word is read and written by one thread.
// 2. The null block as source is the zero state; nothing is read.
#pragma once

#include "cuda_backend/kernels/words.cuh"

namespace lockstep::cuda {
namespace SIMT_VARIANT {

inline constexpr std::uint32_t kPartState = 16;

// Planted here because no item can say either: a token twice, and a word by two threads.
enum class StateDefect { none, pads_included, update_race };

// Grid: x is the update, y the state tensor of its group, z shares the words.
template <StateDefect kDefect>
__global__ void state_update_kernel(StateUpdateParams p) {
  const StateUpdateItem item = p.items[blockIdx.x];
  if (item.group < 0) return;
  const RegionRange range = p.groups[item.group];
  if (std::int32_t(blockIdx.y) >= range.end - range.begin) return;
  const StateCache state = p.states[range.begin + blockIdx.y];
  const std::byte* from = state.base + item.source * state.page_stride;
  std::byte* to = state.base + item.target * state.page_stride;
  const std::uint64_t place = coordinate(state.layer, kPartState + state.state, state.first_head);
  constexpr bool kPadsIncluded = kDefect == StateDefect::pads_included;
  const std::int64_t step = std::int64_t(gridDim.z) * blockDim.x;
  std::int64_t i = std::int64_t(blockIdx.z) * blockDim.x + threadIdx.x;
  if (kDefect == StateDefect::update_race && i == 1) i = 0;  // the word of thread 0 too
  for (; 8 * i < state.size_bytes; i += step) {
    const std::int64_t left = state.size_bytes - 8 * i;
    const std::int32_t bytes = left < 8 ? std::int32_t(left) : 8;
    std::uint64_t word = 0;
    if (item.source != 0) word = load_word(from + 8 * i, bytes, state.unit_bytes);
    for (std::int32_t n = 0; n < item.num_tokens + (kPadsIncluded ? 1 : 0); ++n) {
      const std::int32_t token = kPadsIncluded && n == item.num_tokens ? n - 1 : n;
      const std::uint64_t content = p.contents[item.first_token + token];
      word = word * 0xD1342543DE82EF95ull + mix(content ^ place ^ std::uint64_t(i));
    }
    store_word(to + 8 * i, word, bytes, state.unit_bytes);
  }
}

}  // namespace SIMT_VARIANT
}  // namespace lockstep::cuda
