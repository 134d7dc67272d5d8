// The granularities in tokens that follow from groups and configuration, and what a release
// refuses. Source of the rules: vllm/v1/core/kv_cache_utils.py (resolve_kv_cache_block_sizes) and
// the assertions of kv_cache_coordinator.py and single_type_kv_cache_manager.py.
#pragma once

#include <cstdint>
#include <span>

#include "base/result.h"
#include "reference/types/engine_config.h"
#include "reference/types/kv_cache_spec.h"

namespace lockstep {

struct BlockSizes {
  std::int32_t scheduler_block_size = 0;  // what hits and chunk ends of hybrids are multiples of
  std::int32_t hash_block_size = 0;       // tokens per block hash
  // A hit may end inside a block, at a multiple of the hash block.
  bool hits_parts_of_blocks = false;

  std::int32_t cache_hit_alignment_tokens() const {
    return hits_parts_of_blocks ? hash_block_size : scheduler_block_size;
  }
};

// Refuses what the engine refuses (sizes that do not divide each other, groups that context
// parallelism or prefix caching cannot serve) and what is not modelled of it. REQUIRES:
// config.engine names a profile.
Result<BlockSizes> resolve_block_sizes(const EngineConfig& config,
                                       std::span<const KVCacheGroupSpec> groups);

// The same sizes of groups that are only planned, not served: refused is what has no such sizes.
Result<BlockSizes> planned_block_sizes(const EngineConfig& config,
                                       std::span<const KVCacheGroupSpec> groups);

// hash_lookahead_of() of the engine's profile. REQUIRES: as above.
std::int32_t num_hash_lookahead_tokens_of(const EngineConfig& config);

}  // namespace lockstep
