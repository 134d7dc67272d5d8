// The bundled sample: a request trace made from a seed, with everything that makes a paged KV cache
// work hard, in a size that replays in seconds.
//
// 1. Same parameters, same bytes, on every machine: integers and splitmix64 only.
// 2. Every prompt except the shortest starts with one global block; most continue with one of two
//    shared prompts, of 12 and of 5 blocks, which makes prefix hits of three lengths.
// 3. Some prompts are exact repeats of whole blocks (completely cached: the last token is computed
//    again), some have 1 to 3 tokens, some continue a conversation (after + delay, with a longer
//    prompt).
// 4. Arrivals are bursts of equal times, tight enough for the hinted pool to preempt and evict.
#pragma once

#include <cstdint>

#include "traces/formats/request_trace.h"

namespace lockstep {

struct SampleParameters {
  std::uint64_t seed = 1;
  std::int32_t num_requests = 320;
  std::int32_t block_size = 16;   // tokens
  std::int64_t num_blocks = 128;  // of the hinted pool
};

// Requires: at least one request, block_size at least 4.
Trace make_sample_trace(const SampleParameters& parameters);

}  // namespace lockstep
