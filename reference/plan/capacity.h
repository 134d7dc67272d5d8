// How much of the pool one request may hold: what the admission of a plan and its capacity follow
// from.
//
// 1. Blocks are counted for a request of options.max_model_len tokens, at the moment it holds most.
// 2. Groups whose cost does not grow with length (states in modes none and align, windows, chunks)
//    have a bound; full attention and states in mode all grow with every block of tokens. Rules:
//    vllm/v1/kv_cache_interface.py (max_memory_usage_bytes) and kv_cache_utils.py.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "reference/types/engine_config.h"
#include "reference/types/plan_options.h"

namespace lockstep {

// Blocks of one layer's cache. Under context parallelism a rank keeps its share of the tokens.
std::int64_t max_blocks_per_request(const KVCacheSpec& spec, const PlanOptions& options);
std::int64_t max_blocks_per_request(const KVCacheGroupSpec& group, const PlanOptions& options);

// What an engine's check at start reads of its options.
PlanOptions plan_options_of(const EngineConfig& engine);
// Blocks that one request of max_model_len takes, all groups together; with a step in flight two
// batches hold their windows at once.
std::int64_t planned_blocks_of_request(const EngineConfig& engine,
                                       std::span<const KVCacheGroupSpec> groups);
// Blocks of the pool that sinks take from it.
std::int64_t num_sink_blocks(std::span<const KVCacheGroupSpec> groups);

// Whether the blocks of a request grow with its length for as long as it runs.
bool grows_with_length(const KVCacheSpec& spec);

// Bytes of a pool that just holds one such request, every group's empty places included.
std::int64_t request_bytes(std::span<const KVCacheGroupSpec> groups, const PlanOptions& options);
// Bytes of all tensors together that one block takes.
std::int64_t pool_bytes_per_block(std::span<const KVCacheGroupSpec> groups);
// Tensors that a pool of these groups has; for groups of uniform type, tuples of tensors.
std::int64_t tensors_per_pool(std::span<const KVCacheGroupSpec> groups);

// The longest length up to `longest` that fits, where every shorter one fits, too; 0: none.
template <class Fits>
std::int64_t longest_that_fits(std::int64_t longest, const Fits& fits) {
  std::int64_t fit = 0;
  for (std::int64_t low = 1; low <= longest;) {
    const std::int64_t length = low + (longest - low) / 2;
    if (fits(length))
      low = (fit = length) + 1;
    else
      longest = length - 1;
  }
  return fit;
}
// The largest max_model_len, at most the one in options, whose request fits; 0 when not even one
// token does.
std::int64_t largest_model_len(std::span<const KVCacheGroupSpec> groups, PlanOptions options,
                               std::int64_t memory_bytes);

// Every group of uniform type: each layer has its own page size. Requires a group.
bool all_uniform_type(std::span<const KVCacheGroupSpec> groups);

// The page sizes that the layers of a group of uniform type have, ascending, each once.
std::vector<std::int64_t> page_sizes(const KVCacheGroupSpec& group);

// What a plan can hold: tokens, requests, bytes per token, waste; each figure with its formula, and
// the older formulas where they were wrong.
//
// 1. max_concurrency is one IEEE division, num_blocks / blocks_per_request; capacity_tokens is that
//    times max_model_len, truncated to an integer: bit for bit what vLLM 0.22.1 reports.
// 2. A group whose cost does not grow with length never divides the capacity (vLLM 40384, 40417).
// 3. A buffer indexed by slots needs slot_address_space rows, not capacity_tokens (37118): a slot
//    is a position in the pool, held or free. Rules: vllm/v1/core/kv_cache_utils.py
//    (get_max_concurrency_for_kv_cache_config).

struct GroupCapacity {
  CacheKind kind{};
  std::int64_t block_size = 0;
  std::int64_t blocks_per_request = 0;
  bool grows = false;
  // One block of the pool in the hands of this group, over all tensors:
  std::int64_t used_bytes = 0;
  std::int64_t padding_bytes = 0;       // of pages longer than their content
  std::int64_t pack_waste_bytes = 0;    // places of the last pack that no layer fills
  std::int64_t absent_layer_bytes = 0;  // tensors where the group has no layer
  std::int64_t slot_address_space = 0;  // slots 0 .. num_blocks * block_size - 1; 0 for states
};

struct Formula {
  std::string figure;   // "capacity_tokens"
  std::string formula;  // with the numbers put in
};

struct Capacity {
  std::int64_t num_blocks = 0;
  std::int64_t usable_blocks = 0;  // without the null block
  std::int64_t blocks_per_request = 0;
  double max_concurrency = 0;
  std::int64_t capacity_tokens = 0;
  std::int64_t growing_groups_tokens = 0;  // by the formula of 40384
  std::int64_t all_groups_tokens = 0;      // before it: divided by every group
  double bytes_per_token = 0;              // that a longer request takes more
  std::int64_t fixed_bytes_per_request = 0;
  std::int64_t pool_bytes = 0;
  std::int64_t slot_address_space = 0;  // of the group with most slots
  std::int64_t hit_step_tokens = 0;     // a prefix hit is a multiple of this; 0: no hits
  std::vector<GroupCapacity> groups{};
  std::vector<Formula> formulas{};
};

// Requires a plan with groups.
Capacity capacity_of(const KVCacheConfig& config, const PlanOptions& options);

// Tokens that a second request with the same prompt hits: whole steps of Capacity::hit_step_tokens,
// and never the last token. A step longer than the prompts makes prefix caching useless (35703: 1 %
// of tokens).
std::int64_t resend_hit_tokens(std::int64_t hit_step_tokens, std::int64_t prompt_tokens);

// The warning that no prompt is long enough to be hit; `limit` names what limits the prompts.
std::string unfilled_block_text(std::int64_t hit_step_tokens, std::int64_t prompt_tokens_max,
                                std::string_view limit);

// num_blocks // groups * smallest block size: of the groups that grow, where one does, or of every
// group, the formula until 40384.
std::int64_t tokens_of_groups(const KVCacheConfig& config, const PlanOptions& options,
                              bool growing_only);

}  // namespace lockstep
