// The shape and order of each attention backend's cache, as the engine's backend classes define
// them.
//
// 1. shape() is the logical shape; stride_order()[i] is the logical dimension that is i-th in
//    memory.
// 2. A layers dimension is the first logical dimension.
// 3. The block dimension is found with a number of blocks that no other dimension has, never
//    guessed.
// Sources: get_kv_cache_shape and get_kv_cache_stride_order of vllm/v1/attention/backends/.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "cuda_backend/kernels/params.h"
#include "reference/types/kv_cache_spec.h"
#include "reference/types/view_types.h"

namespace lockstep::cuda {

using Dims = std::vector<std::int64_t>;
using Order = std::vector<std::int32_t>;

// Which backend shapes this layer when `chosen` runs the model's attention; none for states.
std::optional<AttentionBackend> backend_of(const KVCacheSpec& spec, AttentionBackend chosen);

// Tokens that a kernel of this backend takes as one block: the listed sizes, or every multiple of
// 16 (or 1) where the list is empty.
struct KernelSizes {
  std::vector<std::int64_t> listed;  // descending
  std::int64_t base = 1;
  bool takes(std::int64_t size) const;
};
KernelSizes kernel_sizes(AttentionBackend backend, bool hybrid_fp32);

Dims cache_shape(AttentionBackend backend, const KVCacheSpec& spec, std::int64_t num_blocks,
                 std::int64_t block_size);
Order stride_order(AttentionBackend backend, CacheLayout layout, bool layers_dimension);

// Rows that `tokens` tokens from the start of a block take.
constexpr std::int64_t stored_rows(const KVCacheSpec& spec, std::int64_t tokens) {
  return rows_before(token_rows(spec.tokens_per_state), tokens);
}

std::int64_t numel(std::span<const std::int64_t> dims);
// Strides of a dense array of this shape, last dimension innermost.
Dims dense_strides(const Dims& shape);
// Strides of the logical dimensions when they lie in memory in the order `order`.
Dims ordered_strides(const Dims& shape, const Order& order);

// Which logical dimension is what: cache_shape asked with telling numbers.
struct DimRoles {
  std::int32_t block = 0;
  std::int32_t kv = -1;
  std::int32_t token = -1;
  std::int32_t head = -1;
};
DimRoles dim_roles(AttentionBackend backend);

}  // namespace lockstep::cuda
