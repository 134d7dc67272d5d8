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

// The largest max_model_len, at most the one in options, whose request fits; 0 when not even one
// token does.
std::int64_t largest_model_len(std::span<const KVCacheGroupSpec> groups, PlanOptions options,
                               std::int64_t memory_bytes);

// Every group of uniform type: each layer has its own page size. Requires a group.
bool all_uniform_type(std::span<const KVCacheGroupSpec> groups);

// The page sizes that the layers of a group of uniform type have, ascending, each once.
std::vector<std::int64_t> page_sizes(const KVCacheGroupSpec& group);
// Layers of its commonest page size.
std::int64_t num_layer_tuples(const KVCacheGroupSpec& group);

}  // namespace lockstep
