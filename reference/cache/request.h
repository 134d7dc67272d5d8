// A live request as the scheduler and the cache managers keep it.
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

// What one request holds in one KV cache group.
struct GroupBlocks {
  std::vector<BlockId> blocks;  // the block table; null where the request no longer keeps a block
  // Blocks whose content was offered to the prefix cache; -1: the manager does not track the
  // request yet.
  std::int32_t num_cached_blocks = -1;
  // Mamba, mode `align`: place of the block whose state was the running one two allocations ago;
  // whether the request has its running and speculative blocks.
  std::int32_t last_state_block_idx = -1;
  std::int32_t num_retired_blocks = 0;  // entries at the head that no longer hold a state
  // A state that this step exports from inside its chunk: of how many tokens (0: none), and into
  // which entry.
  std::int32_t checkpoint_position = 0;
  std::int32_t checkpoint_idx = 0;
  bool has_state_blocks = false;
  // The entry and block that others know by the first part of what it will hold, and that the next
  // allocation therefore gives a copy of; the null block: none.
  std::int32_t part_idx = 0;
  BlockId part_block = kNullBlock;

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

// Up to where nothing happens to the block tables of a request, in any group: it has slots for
// `num_tokens`, no block goes before `retires_at` tokens are left behind, and none is full before
// `publishes_at` are computed. Most decode steps end here.
struct TableRest {
  std::int32_t num_tokens = 0;
  std::int32_t retires_at = 0;
  std::int32_t publishes_at = 0;
};

inline constexpr std::int32_t kNoToken = std::numeric_limits<std::int32_t>::min();

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

  // A sampled `token` ends it, whatever its length.
  bool ends_with(std::int32_t token) const {
    return token == eos_token || std::ranges::find(stop_token_ids, token) != stop_token_ids.end();
  }

  // Its output ends with a pattern as often as it may not.
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

  // The order of the priority queue: smaller first, then earlier, then by name.
  bool before(const Request& other) const {
    return std::tie(priority, arrival_ns, name) <
           std::tie(other.priority, other.arrival_ns, other.name);
  }

  // What every step of it asks comes first, in as few cache lines as it takes: hundreds of requests
  // run at once, and together they are larger than the processor's first cache.
  RequestStatus status = RequestStatus::waiting;
  bool has_min_tokens = false;
  bool detects_repetition = false;
  bool is_prefill_chunk = false;    // its last step was a prefill chunk that is not the final one
  bool drops_stale_output = false;  // stale output is dropped, not delivered
  std::int32_t num_computed_tokens = 0;
  std::int32_t num_output_placeholders = 0;  // async scheduling: output tokens in flight
  std::int32_t num_in_flight_tokens = 0;     // scheduled, and the output has not come back
  std::int32_t num_stale_tokens = 0;         // of these, scheduled before the last preemption
  std::int32_t num_outputs_to_drop = 0;      // the next ones; of releases that count placeholders
  std::int32_t max_tokens;
  std::int32_t eos_token;  // kNoToken: none; -1 is a placeholder draft, which a model may accept
  TableRest rest;          // KVCacheCoordinator's; all zero before the first look
  std::vector<std::int32_t> spec_tokens;  // drafts for the next step
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
  std::int32_t priority;
  std::int32_t num_preemptions = 0;
  std::int64_t last_step = 0;  // last step that scheduled it, counting non-empty steps from 1
  std::int32_t shared_prefix_boundary = 0;  // PrefixHit's, of the last lookup
  std::int32_t num_encoder_rows = 0;        // of the items that its encoder computed, or is to
};

}  // namespace lockstep
