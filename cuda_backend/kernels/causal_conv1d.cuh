// Causal convolution of each channel over its last `width` inputs, for chunks, single tokens and
// speculative tokens, with the inputs that later steps need kept in a state (ConvItem).
//
// 1. One thread does all of a channel's state: it takes the old inputs into registers before it
//    writes any of the state, and writes the state when it has read all. So a state that is shifted
//    within its own block has nothing to race with (vLLM issue 50729). Tokens further on read their
//    history from the inputs, and no state.
// 2. Source block 0 is the zero state; target block 0 keeps no state, nor does checkpoint 0.
// 3. Tolerance: an output is a chain of `width` fmaf on the bias: (width + 1) u sum|w x| before the
//    activation, whose slope is at most 1.1 and which adds 12 u of its size, then one rounding to
//    dtype. The state is moved: exact.
#pragma once

#include "cuda_backend/kernels/engine_params.h"
#include "cuda_backend/kernels/number_formats.cuh"

namespace lockstep::cuda {
namespace SIMT_VARIANT {

__device__ __forceinline__ std::byte* conv_state(const ConvParams& p, std::int64_t block,
                                                 std::int64_t channel, std::int64_t position) {
  return p.states + block * p.page_stride + channel * p.channel_stride +
         position * p.position_stride;
}
__device__ __forceinline__ const std::byte* conv_input(const ConvParams& p, std::int64_t token,
                                                       std::int64_t channel) {
  return p.inputs + token * p.input_token_stride + channel * element_bytes(p.dtype);
}

template <int kWidth>
struct ConvHistory {
  float inputs[kWidth];  // the last is the newest

  __device__ __forceinline__ void push(float input) {
    SIMT_UNROLL
    for (int i = 0; i + 1 < kWidth; ++i) inputs[i] = inputs[i + 1];
    inputs[kWidth - 1] = input;
  }
};

// Inputs [first, last) of the sequence (old inputs, tokens) become the state of `target`. `old` are
// the inputs before the first token.
template <int kWidth>
__device__ __forceinline__ void keep_inputs(const ConvParams& p, const ConvItem& item,
                                            std::int64_t channel, const ConvHistory<kWidth>& old,
                                            std::int32_t target, std::int32_t first,
                                            std::int32_t last) {
  if (target == 0) return;
  for (std::int32_t from = first; from < last; ++from) {
    float input = 0.0f;
    if (from < kWidth - 1) {
      SIMT_UNROLL
      for (int i = 0; i + 1 < kWidth; ++i)
        if (i == from) input = old.inputs[i + 1];
    } else {
      input = load_number(conv_input(p, item.first_token + from - (kWidth - 1), channel), p.dtype);
    }
    store_number(conv_state(p, target, channel, from - first), input, p.dtype);
  }
}

inline constexpr std::int32_t kConvTokens = 64;  // of a segment

// Grid: x is the item, y shares the channels, z is the segment of kConvTokens tokens.
template <int kWidth>
__global__ void causal_conv1d_kernel(ConvParams p) {
  const ConvItem item = p.items[blockIdx.x];
  const std::int32_t begin = blockIdx.z * kConvTokens, end = begin + kConvTokens;
  if (begin >= item.num_tokens) return;
  const std::int64_t last = item.first_token + (end < item.num_tokens ? end : item.num_tokens);
  for (std::int64_t channel = std::int64_t(blockIdx.y) * blockDim.x + threadIdx.x;
       channel < p.num_channels; channel += std::int64_t(gridDim.y) * blockDim.x) {
    ConvHistory<kWidth> history{}, old;
    if (begin > 0) {  // a segment has more tokens than the width
      for (std::int32_t i = 1; i < kWidth; ++i)
        history.push(
            load_number(conv_input(p, item.first_token + begin - kWidth + i, channel), p.dtype));
    } else if (item.source != 0) {
      for (std::int32_t i = 0; i + 1 < kWidth; ++i)
        history.push(load_number(conv_state(p, item.source, channel, item.offset + i), p.dtype));
    }
    old = history;
    const float* weights = p.weights + channel * kWidth;
    const float bias = p.bias == nullptr ? 0.0f : p.bias[channel];
    for (std::int64_t t = item.first_token + begin; t < last; ++t) {
      history.push(load_number(conv_input(p, t, channel), p.dtype));
      float sum = bias;
      SIMT_UNROLL
      for (int i = 0; i < kWidth; ++i) sum = fmaf(weights[i], history.inputs[i], sum);
      store_number(p.outputs + t * p.output_token_stride + channel * element_bytes(p.dtype),
                   p.silu ? silu(sum) : sum, p.dtype);
    }
    if (begin > 0) continue;
    keep_inputs<kWidth>(p, item, channel, old, item.checkpoint, item.checkpoint_tokens,
                        item.checkpoint_tokens + kWidth - 1);
    keep_inputs<kWidth>(p, item, channel, old, item.target, item.keep_from,
                        kWidth - 1 + item.num_tokens);
  }
}

}  // namespace SIMT_VARIANT
}  // namespace lockstep::cuda
