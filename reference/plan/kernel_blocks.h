// Which block sizes an attention kernel can address, and how a manager block is split into them.
//
// 1. kernel block id = block_id * blocks_per_kv_block + i, i in [0, blocks_per_kv_block).
// 2. kernel_block_size * blocks_per_kv_block = block_size of the group.
// 3. All layers of a group share one kernel block size, since they share one block table.
// Rules: vllm/v1/worker/utils.py (select_common_block_size) and the backends' supported sizes.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "base/result.h"
#include "reference/types/kv_cache_spec.h"
#include "reference/types/view_types.h"

namespace lockstep {

// Either the listed sizes (ascending), or every multiple of `multiple_of`.
struct SupportedBlockSizes {
  std::vector<std::int64_t> exact;
  std::int64_t multiple_of = 0;

  bool contains(std::int64_t block_size) const;
  std::int64_t smallest() const { return exact.empty() ? multiple_of : exact.front(); }
};

// The backend that reads a layer's cache in a model run with `chosen` for its attention layers;
// absent for states, which no attention kernel reads.
std::optional<AttentionBackend> layer_backend(const KVCacheSpec& spec, AttentionBackend chosen);

// `fp32_states`: the model is a hybrid whose states are kept in fp32; FlashAttention then takes
// only 16, 32 and 64 (Dao-AILab/flash-attention issue 1974: NaN in recycled bytes spreads
// otherwise).
SupportedBlockSizes supported_block_sizes(AttentionBackend backend, bool fp32_states);
bool has_fp32_states(const KVCacheConfig& config);

// Per group: the kernel block size. A state group is not split: its own block size stands.
// Encoder-only groups keep no cache and come last; they have no entry, as in vLLM.
Result<std::vector<std::int64_t>> kernel_block_sizes(const KVCacheConfig& config,
                                                     AttentionBackend chosen);

// One group. `group_index` only names it in an error.
Result<std::int64_t> kernel_block_size(const KVCacheGroupSpec& group, AttentionBackend chosen,
                                       bool fp32_states, std::size_t group_index);

}  // namespace lockstep
