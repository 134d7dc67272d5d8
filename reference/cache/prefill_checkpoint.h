// Where a prefill exports a state from inside its last chunk, so that a resend of the prompt finds
// it: the chunk then need not end there. Source of the rules: vllm/v1/kv_cache_interface.py
// (get_mamba_prefill_checkpoint_position, is_mamba_prefill_checkpoint_valid).
#pragma once

#include <algorithm>
#include <cstdint>

#include "reference/profiles/engine_profile.h"
#include "reference/types/engine_config.h"

namespace lockstep {

// The last place before the end of num_tokens tokens that a hit can end at: a multiple of
// `alignment`, with a token behind it for the logits, or as many as its hash covers. EAGLE that
// drops a block of each hit proves the tokens itself and needs one block before.
constexpr std::int32_t prefill_checkpoint_position(std::int32_t num_tokens, std::int32_t alignment,
                                                   bool drops_last_block,
                                                   std::int32_t num_hash_lookahead_tokens) {
  const std::int32_t proven =
      drops_last_block ? num_tokens : num_tokens - std::max(1, num_hash_lookahead_tokens);
  const std::int32_t last = std::max(proven, 0) / alignment * alignment;
  return drops_last_block ? std::max(last - alignment, 0) : last;
}

// How an engine's hits end, and where what they resume from is kept.
struct HitEnd {
  bool drops_last_block = false;  // EAGLE without lookahead hashes
  std::int32_t num_hash_lookahead_tokens = 0;
  PromptEnds prompt_ends = PromptEnds::before_last_token;
  bool parts_leave_dropped_hash = true;

  constexpr std::int32_t last_position(std::int32_t num_tokens, std::int32_t alignment) const {
    return prefill_checkpoint_position(num_tokens, alignment, drops_last_block,
                                       num_hash_lookahead_tokens);
  }
  // Of num_tokens tokens, the place of the last state that fills a block.
  constexpr std::int32_t last_state(std::int32_t num_tokens, std::int32_t block_size) const {
    return prompt_ends == PromptEnds::before_last_token
               ? last_position(num_tokens, block_size)
               : last_boundary(num_tokens, block_size, drops_last_block);
  }
  // The same of a part of a block, which ends at a hash.
  constexpr std::int32_t last_part(std::int32_t num_tokens, std::int32_t hash_block_size) const {
    return prompt_ends == PromptEnds::before_last_token
               ? last_position(num_tokens, hash_block_size)
               : last_boundary(num_tokens, hash_block_size,
                               drops_last_block && parts_leave_dropped_hash);
  }

 private:
  static constexpr std::int32_t last_boundary(std::int32_t num_tokens, std::int32_t unit,
                                              bool leaves_one) {
    return std::max(num_tokens / unit * unit - (leaves_one ? unit : 0), 0);
  }
};
inline HitEnd hit_end_of(const EngineConfig& config, const EngineProfile& profile) {
  const std::int32_t lookahead = hash_lookahead_of(config, profile);
  return {config.spec_method == SpecMethod::eagle && lookahead == 0, lookahead, profile.prompt_ends,
          profile.tails_leave_eagles_block};
}

// One chunk, and what can be exported from it. All in tokens.
struct CheckpointQuery {
  std::int32_t begin = 0;
  std::int32_t end = 0;
  std::int32_t position = 0;
  std::int32_t hash_block_size = 1;
  std::int32_t state_block_size = 1;
  // of the position, relative to the start; 0: the kernel exports nothing
  std::int32_t alignment = 0;
};

// True if the kernel of the chunk can export the state at `position` into the table's second last
// entry, which must come after the entry of the chunk's first state.
constexpr bool exports_checkpoint(const CheckpointQuery& chunk) {
  if (chunk.alignment == 0) return false;
  const std::int32_t size = chunk.state_block_size;
  const std::int32_t first_entry = chunk.begin == 0 ? -1 : (chunk.begin - 1) / size;
  const std::int32_t entry = (chunk.end + size - 1) / size - 2;
  return chunk.begin % chunk.hash_block_size == 0 && entry > first_entry &&
         chunk.begin + chunk.hash_block_size <= chunk.position && chunk.begin < chunk.position &&
         chunk.position < chunk.end && (chunk.position - chunk.begin) % chunk.alignment == 0;
}

}  // namespace lockstep
