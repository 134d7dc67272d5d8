// How far a configuration, its groups and a pool may go: beyond what any engine is given, and so
// near that sums and products of what is counted fit into the model's types and its memory.
//
// (1) Counts of tokens (of a request, a step, a block of all context parallel ranks, a window) are
//     at most kTokensMax, blocks of a pool at most kPoolBlocksMax.
// (2) A page has at most kPageBytesMax bytes.
//
// Not checked here: whether an engine would take such a configuration.
#pragma once

#include <cstdint>
#include <span>

#include "base/result.h"
#include "reference/types/engine_config.h"
#include "reference/types/kv_cache_spec.h"

namespace lockstep {

inline constexpr std::int64_t kTokensMax = std::int64_t{1} << 29;
inline constexpr std::int64_t kPoolBlocksMax = std::int64_t{1} << 25;
inline constexpr std::int64_t kSpecTokensMax = 1024;  // drafts of one request and step
inline constexpr std::int64_t kContextRanksMax = 1024;
inline constexpr std::int64_t kPageBytesMax = std::int64_t{1} << 36;

// Names the option or the group's key that goes too far.
Result<void> check_limits(const EngineConfig& config);
Result<void> check_limits(const EngineConfig& config, std::span<const KVCacheGroupSpec> groups,
                          std::int64_t num_blocks);

// Refused, as by every engine: a step that could not schedule one token per running request.
Result<void> check_step(std::int64_t max_num_batched_tokens, std::int64_t max_num_seqs);

// Whether a page of at most `bytes_max` surely holds a block of the layer, or one token where its
// block size is still open.
bool page_fits(const KVCacheSpec& spec, std::int64_t bytes_max);

}  // namespace lockstep
