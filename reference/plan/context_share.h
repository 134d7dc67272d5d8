// Which of a request's tokens a rank of context parallelism keeps, and where
// (vllm/v1/worker/block_table.py, compute_slot_mapping).
//
// 1. The token at position p is kept by rank (p / interleave) % num_ranks, and by no other.
// 2. What a rank keeps lies in order and without gaps: its n-th token is at offset n % block_size
//    of entry n / block_size of the block table, which is the same on every rank.
//
// Not here: what the ranks exchange to attend to all tokens.
#pragma once

#include <cstdint>

#include "reference/types/engine_config.h"
#include "reference/types/kv_cache_spec.h"
#include "reference/types/ranks.h"

namespace lockstep {

bool keeps(const ContextRank& at, std::int64_t position);
// The rank as a replicated cache sees it, which keeps all tokens.
ContextRank rank_in(const ContextRank& at, const KVCacheSpec& spec);
// How many of the first `position` tokens the rank keeps: the index among them of the token at
// `position`, where that is one of its own.
std::int64_t num_kept(const ContextRank& at, std::int64_t position);

// Number of ranks that shard the tokens of a group's blocks: 1 for states, for replicated caches,
// and for an unknown engine, which Scheduler::create refuses.
std::int32_t num_context_ranks(const EngineConfig& config, const KVCacheSpec& spec);

}  // namespace lockstep
