// How many bytes one block of a layer takes: the arithmetic of KVCacheSpec.
//
// 1. real_page_size_bytes counts what is written; page_size_bytes adds inline scales and padding.
// 2. page_size_bytes >= real_page_size_bytes; a padded page smaller than its content is a
//    programmer error here and is refused with a reason where a user can cause it (planner.h).
// 3. Every count is in 64 bits.
// Rules: vllm/v1/kv_cache_interface.py.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/result.h"
#include "reference/types/kv_cache_spec.h"
#include "reference/types/token_rows.h"
#include "reference/types/view_types.h"

namespace lockstep {

constexpr std::int64_t cdiv(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
constexpr std::int64_t round_up(std::int64_t a, std::int64_t b) { return cdiv(a, b) * b; }

// a * b, or the largest number there is: a need that large is refused like any other.
constexpr std::int64_t saturating_product(std::int64_t a, std::int64_t b) {
  std::int64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? INT64_MAX : product;
}

// Rows that a block stores: block_size, divided by the compress ratio of an MLA cache.
std::int64_t storage_block_size(const KVCacheSpec& spec);
// Elements of V's row (head_size where the spec does not say otherwise).
std::int64_t head_size_v(const KVCacheSpec& spec);
// Elements of state tensor `spec.states[index]`, and its bytes.
std::int64_t num_elements(const StateTensorSpec& state);
std::int64_t size_bytes(const StateTensorSpec& state);

// Bytes written in one block, scales of per-token-head quantization left out.
std::int64_t real_page_size_bytes(const KVCacheSpec& spec);
// Bytes of one block in a tensor: with inline scales, and padded where the spec requires it.
std::int64_t page_size_bytes(const KVCacheSpec& spec);
// As page_size_bytes, but of what is really there: no padding.
std::int64_t unpadded_page_size_bytes(const KVCacheSpec& spec);

// The spec of all layers of the group, or one a layer.
inline std::span<const KVCacheSpec> specs_of(const KVCacheGroupSpec& group) {
  return group.is_uniform_type() ? std::span(group.layer_specs) : std::span(&group.spec, 1);
}
// A page of one layer of the group; the sum over the layers when the group is of uniform type.
std::int64_t page_size_bytes(const KVCacheGroupSpec& group);
// What one block takes of a tensor: the page of one layer times the layers that share it.
std::int64_t pool_page_size_bytes(const KVCacheGroupSpec& group);

// The spec with page_size_padded set to what `spec.alignment` asks for (DeepSeek-V4 caches).
KVCacheSpec with_alignment_padding(KVCacheSpec spec);

// Which block sizes an attention kernel can address, and how a manager block is split into them.
//
// 1. kernel block id = block_id * blocks_per_kv_block + i, i in [0, blocks_per_kv_block).
// 2. kernel_block_size * blocks_per_kv_block = block_size of the group.
// 3. All layers of a group share one kernel block size, since they share one block table.
// Rules: vllm/v1/worker/utils.py (select_common_block_size) and the backends' supported sizes.

// Block sizes that a kernel takes: the listed ones, or every multiple of one.
struct KernelSizes {
  std::vector<std::int64_t> listed = {};
  std::int64_t multiple_of = 0;  // 0: only the listed ones
  bool takes(std::int64_t block_size) const;
  std::int64_t smallest() const;
};
// The block itself if all take it, else the largest listed size that divides it and that all take
// (vllm/v1/worker/utils.py: select_common_block_size). An Error: there is none.
Result<std::int64_t> common_kernel_block(std::int64_t block_size,
                                         const std::vector<KernelSizes>& sizes);

// The backend that reads a layer's cache in a model run with `chosen` for its attention layers;
// absent for states, which no attention kernel reads.
std::optional<AttentionBackend> layer_backend(const KVCacheSpec& spec, AttentionBackend chosen);

// `fp32_states`: the model is a hybrid whose states are kept in fp32; FlashAttention then takes
// only 16, 32 and 64 (Dao-AILab/flash-attention issue 1974: NaN in recycled bytes spreads
// otherwise).
KernelSizes kernel_sizes(AttentionBackend backend, bool fp32_states);
bool has_fp32_states(const KVCacheConfig& config);

// Per group: the kernel block size. A state group is not split: its own block size stands.
// Encoder-only groups keep no cache and come last; they have no entry, as in vLLM.
Result<std::vector<std::int64_t>> kernel_block_sizes(const KVCacheConfig& config,
                                                     AttentionBackend chosen);

// One group. `group_index` only names it in an error.
Result<std::int64_t> kernel_block_size(const KVCacheGroupSpec& group, AttentionBackend chosen,
                                       bool fp32_states, std::size_t group_index);

}  // namespace lockstep
