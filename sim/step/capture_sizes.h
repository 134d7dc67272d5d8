// To how many tokens a batch is padded where CUDA graphs are captured, by vLLM's rule: sizes 1, 2
// and 4, multiples of 8 below 256, multiples of 16 from there on, all of them up to
// max_cudagraph_capture_size, and the largest step itself where that is not above it
// (vllm/config/vllm.py, _set_cudagraph_sizes). The backend looks its sizes up in a list of its own.
#pragma once

#include <cstdint>

namespace lockstep {

// The size of the graph that takes `num_tokens`; 0: none does, the step runs without one.
// REQUIRES: num_tokens >= 0.
std::int64_t captured_batch(std::int64_t num_tokens, std::int64_t max_capture_size,
                            std::int64_t max_tokens_per_step);

}  // namespace lockstep
