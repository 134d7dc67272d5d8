// Where every element of every layer's cache lies in its raw tensor, in closed form: the oracle
// that views, kernels and the memory model are compared with.
//
// 1. byte_offset is exact for every element, in 64 bits, and lies inside the tensor.
// 2. Two elements of one layer never share a byte. Two layers share bytes only across blocks of
//    different groups; a block belongs to one group at a time (sim/check/plan_prover.h proves it).
// 3. A block owns block_extents(): one page, or two half pages when K and V are kept apart.
// 4. Padding and the room of absent pack members belong to the block and are never addressed.
// Not checked here: whether a backend's view agrees (cuda_backend/views/views.h has its own rules).
#pragma once

#include <cstdint>
#include <vector>

#include "base/ids.h"
#include "base/result.h"
#include "reference/types/kv_cache_spec.h"
#include "reference/types/view_types.h"

namespace lockstep {

// K and V of one block: next to each other in its page, or all K first and all V behind.
enum class PairOrder : std::uint8_t { in_page, kv_outermost };

// One tensor of a state page.
struct StateLayout {
  std::int64_t offset_bytes = 0;  // inside the page
  std::int64_t num_elements = 0;
  std::int64_t itemsize_bytes = 0;
};

// Strides are in bytes. A token cache is [num_blocks, block_size] x [num_kv, num_kv_heads,
// head_size]; a state cache is `states`, one set a block.
struct LayerLayout {
  std::int32_t tensor_index = 0;  // of K of head 0, and of states
  // Where heads lie in tensors of their own: from one head to the next, and from K to V.
  std::int32_t head_tensor_step = 0;
  std::int32_t kv_tensor_step = 0;
  std::int64_t tensor_size_bytes = 0;
  CacheKind kind = CacheKind::full_attention;
  PairOrder pair_order = PairOrder::in_page;
  std::int64_t num_blocks = 0;
  std::int64_t page_size_bytes = 0;  // of the tensor: one block of it, padding and pack included
  std::int64_t real_page_size_bytes = 0;  // of this layer: what is addressed in one block
  std::int64_t base_offset_bytes = 0;     // of its first element (its place in the pack)

  std::int64_t block_size = 0;  // rows stored in one block
  std::int64_t kernel_block_size = 0;
  std::int64_t blocks_per_kv_block = 1;
  std::int64_t num_kv = 0;  // rows of a token: 2 (K, V), 1 (MLA, hidden states), 0 (states)
  std::int64_t num_kv_heads = 0;
  std::int64_t head_size = 0;  // elements of a row, inline scales included
  std::int64_t element_size_bytes = 0;
  std::int64_t block_stride_bytes = 0;
  std::int64_t kernel_block_stride_bytes = 0;
  std::int64_t kv_stride_bytes = 0;
  std::int64_t token_stride_bytes = 0;
  std::int64_t head_stride_bytes = 0;

  std::vector<StateLayout> states;
};

struct PoolLayout {
  std::int64_t num_blocks = 0;
  std::vector<std::int64_t> tensor_size_bytes;
  std::vector<std::vector<LayerLayout>> groups;  // [group][layer of the group]
};

// The tensor that a row lies in, and the last one of the layer.
inline std::int32_t tensor_of(const LayerLayout& layer, std::int64_t kv, std::int64_t head) {
  return layer.tensor_index + static_cast<std::int32_t>(kv) * layer.kv_tensor_step +
         static_cast<std::int32_t>(head) * layer.head_tensor_step;
}
inline std::int32_t last_tensor_of(const LayerLayout& layer) {
  return layer.num_kv == 0 ? layer.tensor_index
                           : tensor_of(layer, layer.num_kv - 1, layer.num_kv_heads - 1);
}

// Byte offset in the row's tensor. Requires block in [0, num_blocks), kv in [0, num_kv), slot in
// [0, block_size), head in [0, num_kv_heads), dim in [0, head_size).
inline std::int64_t byte_offset(const LayerLayout& layer, BlockId block, std::int64_t kv,
                                std::int64_t slot, std::int64_t head, std::int64_t dim) {
  const std::int64_t kernel_block = slot / layer.kernel_block_size;
  return layer.base_offset_bytes + index_of(block) * layer.block_stride_bytes +
         kernel_block * layer.kernel_block_stride_bytes + kv * layer.kv_stride_bytes +
         (slot - kernel_block * layer.kernel_block_size) * layer.token_stride_bytes +
         head * layer.head_stride_bytes + dim * layer.element_size_bytes;
}

// Byte offset of element `element` (C order) of state tensor `state`, whatever the dtypes before
// it.
inline std::int64_t state_byte_offset(const LayerLayout& layer, BlockId block, std::size_t state,
                                      std::int64_t element) {
  return index_of(block) * layer.block_stride_bytes + layer.states[state].offset_bytes +
         element * layer.states[state].itemsize_bytes;
}

// The bytes of the tensor that belong to a block, as one or two extents in ascending order.
struct ByteExtent {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  bool operator==(const ByteExtent&) const = default;
};
std::vector<ByteExtent> block_extents(const LayerLayout& layer, BlockId block);

// Elements of one row as the backend shapes it: head_size, plus inline scales, or a layout in
// bytes.
std::int64_t row_elements(const KVCacheSpec& spec);

// Every layer of the plan. Refused: a cache that the backend cannot shape (with the reason).
Result<PoolLayout> pool_layout(const KVCacheConfig& config, AttentionBackend chosen,
                               CacheLayout cache_layout, LayoutRule rule = LayoutRule::isolated);

// The same plan with another number of blocks: tensors grow or shrink in proportion.
KVCacheConfig with_num_blocks(const KVCacheConfig& config, std::int64_t num_blocks);

// The closed form of layout.h as strided views, in the dimensions that the backend names: what a
// recording of views is compared with, and what a person reads.

// One view for a token cache, one a state tensor for states. `backend` is the layer's own
// (layer_backend); it says only in which order dimensions are named. Refused: kernel blocks that
// one stride cannot reach (a padded page that is split).
Result<LayerViews> views_of(const LayerLayout& layer, const KVCacheSpec& spec,
                            AttentionBackend chosen);

// All layers of the plan.
Result<PoolViews> pool_views(const KVCacheConfig& config, AttentionBackend chosen,
                             CacheLayout cache_layout, LayoutRule rule = LayoutRule::isolated);

}  // namespace lockstep
