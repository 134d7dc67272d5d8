// The end of a prefill chunk of a model with states in mode `align`, chosen so that states worth
// keeping are saved. Source of the rules: vllm/v1/core/sched/scheduler.py,
// _mamba_block_aligned_split.
//
// Invariants
// (1) A state is saved at the end of a chunk, under the hash of the block that the chunk fills. A
//     chunk that ends anywhere else saves nothing.
// (2) A rule never lengthens a chunk.
//
// Where the kernels export a state from inside the last chunk of a prefill, that chunk need not end
// at it (prefill_checkpoint.h).
#pragma once

#include <cstdint>
#include <span>

#include "reference/cache/prefill_checkpoint.h"
#include "reference/cache/request.h"
#include "reference/plan/block_sizes.h"
#include "reference/profiles/engine_profile.h"
#include "reference/types/engine_config.h"

namespace lockstep {

class StateChunkRule {
 public:
  StateChunkRule(const EngineConfig& config, const EngineProfile& profile,
                 std::span<const KVCacheGroupSpec> groups, BlockSizes sizes);

  // At most num_new tokens of the request, num_hit of whose tokens a prefix hit has just found, and
  // num_shared behind them that not all groups have; 0: the budget is too small for a chunk that
  // ends well.
  std::int32_t clip(const Request& request, std::int32_t num_new, std::int32_t num_hit,
                    std::int32_t num_shared) const;

 private:
  // Position of the last state that a chunk ends at, under the rules without hash lookahead.
  std::int32_t last_whole_block(const Request& request) const;
  std::int32_t clip_to_whole_blocks(const Request& request, std::int32_t num_new,
                                    std::int32_t computed) const;
  std::int32_t clip_at_block_boundary(const Request& request, std::int32_t num_new,
                                      std::int32_t computed) const;
  bool exports_state(std::int32_t computed, std::int32_t end, std::int32_t prefill_end) const;

  StateChunks rule_;
  BlockSizes sizes_;
  std::int32_t block_size_;
  std::int32_t max_chunk_;  // tokens
  HitEnd hit_end_;
  bool saves_one_earlier_;   // last_whole_block(): EAGLE drops the last block of a hit
  bool cuts_without_parts_;  // a prompt at its last hash also where no hit can end there
  bool exports_states_;      // every group of states has a block for one
  std::int32_t checkpoint_alignment_ = 0;
};

}  // namespace lockstep
