// KV cache specs, groups and plans as JSON, in the words of the recordings.
#pragma once

#include "base/json_reader.h"
#include "base/json_writer.h"
#include "reference/types/kv_cache_spec.h"

namespace lockstep {

inline constexpr std::int64_t kBlocksMax = (std::int64_t{1} << 31) - 1;

// {"type":"full","block_size":16,"num_kv_heads":2,...}: what a kind needs must be there, everything
// else may be. For a model's layers before planning, `block_size` may be left out: 16 then.
KVCacheSpec read_kv_cache_spec(JsonValue value);

// `tokens_per_state` of a spec: 4.
TokensPerState read_tokens_per_state(JsonValue value);

// [{"layers":[..],"spec":{..}},...], at least one.
std::vector<KVCacheGroupSpec> read_kv_cache_groups(JsonValue value);
void write_kv_cache_groups(JsonWriter& out, const std::vector<KVCacheGroupSpec>& groups);

// {"num_blocks":..,"groups":[..],"tensors":[{"size":..,"shared_by":[..]},...]}
KVCacheConfig read_kv_cache_config(JsonValue value);
void write_kv_cache_config(JsonWriter& out, const KVCacheConfig& config);

std::vector<std::string> read_names(JsonValue value);

}  // namespace lockstep
