// From views to what kernels are given: the views that an engine would make of a plan (views.h),
// turned into byte strides, and into the regions that whole-block operations touch. Host arithmetic
// only.
//
// 1. Everything comes from the views; nothing is worked out from a spec twice.
// 2. Zero and copy regions cover exactly the bytes that a layer's rows or states use in a block;
//    poison regions cover the block.
// 3. Rows and states lie where the views that kernels are given say; regions of rows and of poison
//    say what belongs to a block by the plan.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/result.h"
#include "cuda_backend/device/operation.h"
#include "cuda_backend/kernels/params.h"
#include "cuda_backend/views/rank_share.h"
#include "cuda_backend/views/views.h"
#include "sim/protocol/backend.h"

namespace lockstep::cuda {

// What a state tensor is: [dims...] elements, C order.
struct StateShape {
  std::vector<std::int64_t> dims;
  DType dtype = DType::fp32;
  std::int32_t group = 0;
  std::int32_t num_drafts = 0;  // that a convolution keeps inputs for
};

// A block table beside a group's own: kernel block j of block b is b * kernel_block_stride + j.
struct MappedTable {
  std::int32_t group = 0;
  std::int64_t blocks_per_kv_block = 1, kernel_block_stride = 1;
  bool operator==(const MappedTable&) const = default;
};

struct LayerCaches {
  // One entry a layer of the plan, in its order; row_bytes is 0 for layers without rows.
  std::vector<RowCache> rows;
  std::vector<std::int32_t> group_of_layer;
  // The table that its rows are found by: its group's, or behind all groups a mapped one.
  std::vector<std::int32_t> table_of_layer;
  std::vector<std::int32_t> draft_module_of_layer;  // -1: the model's own
  // The tensors that a layer's rows or states lie in, [tensor, last]; -1, -2: it keeps nothing.
  std::vector<std::int32_t> tensor_of_layer;
  std::vector<std::int32_t> last_tensor_of_layer;
  std::vector<StateCache> states;
  std::vector<StateShape> state_shapes;  // of each
  std::vector<RegionRange> states_of_group;
  std::vector<BlockRegion> regions;
  std::vector<RegionRange> regions_of_group;
  std::vector<BlockRegion> poison_regions;
  std::vector<BlockRegion> pages;                 // one entry a tensor: whole pages
  std::vector<std::int64_t> blocks_per_kv_block;  // per group
  std::vector<MappedTable> mapped_tables;
};

// The plan of `config` is the rank's own, `places` are its layers' in the model (rank_share.h).
// tensor_bases: where each tensor of the plan lies, aligned to 256 bytes; overlaid ones follow one
// another behind the first, which is aligned. Tables are left null.
// `given`: the views that kernels are given; null: those of the plan.
// Errors: what derive_views refuses; rows that no contiguous region holds; kernel block sizes other
// than the configuration's.
Result<LayerCaches> layer_caches(const BackendConfig& config, std::span<const LayerOfModel> places,
                                 std::span<std::byte* const> tensor_bases,
                                 const PoolViews* given = nullptr);
// What the configuration asks of views.
ViewOptions view_options(const BackendConfig& config);

// The bytes of a tensor that belong to a block: its page, or the K and the V half of one.
void add_block_ranges(const LayerCaches& layers, std::int32_t tensor, std::int32_t block,
                      std::vector<MemoryRange>& ranges);
// Those of all tensors that the layer lies in.
void add_layer_ranges(const LayerCaches& layers, std::size_t layer, std::int32_t block,
                      std::vector<MemoryRange>& ranges);
inline MemoryRange range_in_block(const BlockRegion& region, std::int32_t block) {
  return range_of(region.base + block * region.block_stride, region.size_bytes);
}

}  // namespace lockstep::cuda
