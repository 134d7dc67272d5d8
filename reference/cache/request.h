// A live request as the scheduler and the cache managers keep it. Plain state: the scheduler owns
// it and changes its counters, the managers change `groups` and `rest`.
//
// Invariants between two steps
// (1) num_computed_tokens exceeds num_tokens() only by drafts and placeholders in flight.
// (2) groups has one entry per KV cache group. Only running, loading, loaded and held requests have
//     blocks.
// (3) hashes covers every full hash block of tokens whose lookahead tokens are known, if prefix
//     caching is on.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/ids.h"
#include "reference/cache/block_hash.h"
#include "reference/types/scheduler_types.h"

namespace lockstep {

// The blocks of one request in one KV cache group.
struct GroupBlocks {
  std::vector<BlockId> blocks;  // the block table; null: the request keeps no block there
  // Table entries whose content was offered to the prefix cache; -1: the request has not been
  // admitted, so it may still have a hit.
  std::int32_t num_cached_blocks = -1;
  // State groups in mode align: the entry of the running state two allocations ago; -1: none.
  std::int32_t last_state_block_idx = -1;
  std::int32_t num_retired_blocks = 0;  // entries at the head without a state
  // A state that this step exports from inside its chunk: tokens that it covers (0: none), and the
  // entry that receives it.
  std::int32_t checkpoint_position = 0;
  std::int32_t checkpoint_idx = 0;
  // True if the request has its running and speculative state blocks.
  bool has_state_blocks = false;
  // A published block of which only the first part is this request's own: the hit ends inside it,
  // or the next step overwrites it. The next allocation replaces it by a copy. The null block:
  // none.
  std::int32_t part_idx = 0;
  BlockId part_block = kNullBlock;

  // Forgets everything, as before admission. checkpoint_idx and part_idx have no meaning without
  // their partners.
  void clear() {
    blocks.clear();
    num_cached_blocks = -1;
    last_state_block_idx = -1;
    num_retired_blocks = 0;
    checkpoint_position = 0;
    has_state_blocks = false;
    part_block = kNullBlock;
  }
};

// The range in which a request's block tables do not change, in any group: it has slots for
// `num_tokens` tokens, no block is freed before `retires_at` tokens are left behind, and no block
// is full before `publishes_at` tokens are computed. Most decode steps stay inside. All zero:
// unknown.
struct TableRest {
  std::int32_t num_tokens = 0;
  std::int32_t retires_at = 0;
  std::int32_t publishes_at = 0;
};

// The eos_token of a request without one. No token id equals it, and neither does the placeholder
// -1.
inline constexpr std::int32_t kNoToken = std::numeric_limits<std::int32_t>::min();

// Aligned to a cache line: see the order of its members below.
struct alignas(64) Request {
  Request(RequestSpec spec, std::int32_t num_groups)
      : max_tokens(spec.max_tokens),
        eos_token(spec.eos_token.value_or(kNoToken)),
        stop_token_ids(std::move(spec.stop_token_ids)),
        tokens(std::move(spec.prompt)),
        groups(num_groups),
        repetition(spec.repetition_detection),
        min_tokens(spec.min_tokens),
        skips_prefix_cache(spec.skip_reading_prefix_cache),
        name(std::move(spec.name)),
        cache_salt(std::move(spec.cache_salt)),
        keys(std::move(spec.keys)),
        arrival_ns(spec.arrival_ns),
        priority(spec.priority) {
    has_min_tokens = min_tokens > 0;
    detects_repetition = repetition.max_pattern_size > 0 && repetition.min_count >= 2;
  }

  std::int32_t num_tokens() const { return static_cast<std::int32_t>(tokens.size()); }
  std::int32_t num_prompt_tokens() const { return static_cast<std::int32_t>(tokens.prompt_size()); }
  std::int32_t num_output_tokens() const { return num_tokens() - num_prompt_tokens(); }

  // True if a sampled `token` ends the request, whatever its length.
  bool ends_with(std::int32_t token) const {
    return token == eos_token || std::ranges::find(stop_token_ids, token) != stop_token_ids.end();
  }

  // True if the output ends with min_count repetitions of one pattern. For each pattern size,
  // compares the last size * min_count tokens with themselves, shifted by one pattern. The prompt
  // does not count.
  bool repeats_itself() const {
    const std::int32_t num_output = num_output_tokens();
    const std::int32_t times = repetition.min_count;
    const std::int32_t end = num_tokens();
    for (std::int32_t size = std::max(repetition.min_pattern_size, 1);
         size <= repetition.max_pattern_size && std::int64_t{size} * times <= num_output; ++size) {
      std::int32_t at = end - size * times;
      while (at < end - size && tokens[at] == tokens[at + size]) ++at;
      if (at == end - size) return true;
    }
    return false;
  }

  // The order of the priority queue: smaller priority first, then earlier arrival, then name.
  bool before(const Request& other) const {
    return std::tie(priority, arrival_ns, name) <
           std::tie(other.priority, other.arrival_ns, other.name);
  }

  // Members that every step reads come first, in as few cache lines as possible: hundreds of
  // requests run at once, and together they are larger than the processor's first cache.
  RequestStatus status = RequestStatus::waiting;
  bool has_min_tokens = false;
  bool detects_repetition = false;
  bool is_prefill_chunk = false;    // true if its last step was a prefill chunk, not the final one
  bool drops_stale_output = false;  // true: stale output is dropped; false: delivered
  std::int32_t num_computed_tokens = 0;      // scheduled tokens included, rejected drafts not
  std::int32_t num_output_placeholders = 0;  // async: sampled tokens, drafts in flight
  std::int32_t num_in_flight_tokens = 0;     // scheduled tokens whose output has not arrived
  std::int32_t num_stale_tokens = 0;         // of these, scheduled before the last preemption
  std::int32_t num_outputs_to_drop = 0;      // outputs to drop, where placeholders count
  std::int32_t max_tokens;
  std::int32_t eos_token;  // kNoToken: none. -1 is a placeholder draft that a model may accept
  TableRest rest;          // KVCacheCoordinator's; all zero before the first allocation
  std::vector<std::int32_t> spec_tokens;  // drafts for the next step; -1: placeholder
  std::vector<std::int32_t> stop_token_ids;
  TokenSequence tokens;
  BlockHashChain hashes;
  std::vector<GroupBlocks> groups;
  RepetitionDetection repetition;
  std::int32_t min_tokens;
  bool skips_prefix_cache;
  std::string name;
  std::string cache_salt;
  RequestKeys keys;
  std::int64_t arrival_ns;
  std::int64_t priority;
  std::int32_t num_preemptions = 0;
  std::int64_t last_step = 0;  // last step that scheduled it, non-empty steps counted from 1
  std::int32_t shared_prefix_boundary = 0;  // PrefixHit's, of the last lookup
  std::int32_t num_encoder_rows = 0;  // of the items that its encoder computed or will compute
};

}  // namespace lockstep
