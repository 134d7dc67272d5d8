// One rank of context parallelism: plain numbers. The tokens of a request are dealt out to the
// ranks in runs of `interleave`; what a rank keeps of them is worked out by the reference
// (reference/plan/context_share.h) and by a backend, each for itself.
#pragma once

#include <cstdint>

namespace lockstep {

struct ContextRank {
  std::int32_t num_ranks = 1;
  std::int32_t rank = 0;
  std::int32_t interleave = 1;  // tokens; divides the block size (cp_kv_cache_interleave_size)
  bool operator==(const ContextRank&) const = default;
};

}  // namespace lockstep
