// From views to kernel parameters: the views that an engine makes of a plan (views.h) as byte
// strides, and as the regions of whole-block operations. Host arithmetic only.
//
// Invariants:
// 1. All addresses come from the views; nothing is derived from a spec a second time.
// 2. Zero and copy regions cover exactly the bytes that a layer's rows or states use in a block.
//    Poison regions cover the block.
// 3. Rows and states have the addresses of the given views. Regions of rows and of poison have
//    those of the plan.
// 4. rows, group_of_layer, table_of_layer, draft_module_of_layer, tensor_of_layer and
//    last_tensor_of_layer have one entry per layer of the plan; states and state_shapes one per
//    state tensor; pages one per tensor.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/result.h"
#include "cuda_backend/device/device.h"
#include "cuda_backend/kernels/params.h"
#include "cuda_backend/views/rank_share.h"
#include "cuda_backend/views/views.h"
#include "reference/types/host_pages.h"
#include "reference/types/kv_cache_spec.h"
#include "sim/protocol/backend.h"

namespace lockstep::cuda {

// Groups of host pages as a worker binds them: resident pages and hot regions have the views of the
// source's layers. The source itself keeps nothing on the device.

// The group of the page source; -1: there is none.
std::int32_t source_group(std::span<const KVCacheGroupSpec> groups);

inline bool is_sparse_source(const KVCacheGroupSpec& group) {
  return group.role == kPageSourceRole;
}
inline bool is_resident_pages(const KVCacheGroupSpec& group) { return group.role == kResidentRole; }
inline bool is_hot_region(const KVCacheGroupSpec& group) { return group.role == kHotRole; }

// Returns the plan with resident and hot groups as MLA caches, marked by their roles. Their layers
// take the specs of the source's layers, in order. The source becomes a cache without memory.
// Without host pages: the plan. Refused: resident or hot layers whose number or page size differs
// from the source's.
Result<KVCacheConfig> bind_sparse_groups(KVCacheConfig plan);

// What a state tensor is: [dims...] elements, C order.
struct StateShape {
  std::vector<std::int64_t> dims;
  DType dtype = DType::fp32;
  std::int32_t group = 0;
  std::int32_t layer = 0;       // in the rank's plan
  std::int32_t num_drafts = 0;  // that a convolution keeps inputs for
};

// A second block table of a group: kernel block j of block b is b * kernel_block_stride + j.
struct MappedTable {
  std::int32_t group = 0;
  std::int64_t blocks_per_kv_block = 1, kernel_block_stride = 1;
  bool operator==(const MappedTable&) const = default;
};

struct LayerCaches {
  // row_bytes is 0 for layers without rows.
  std::vector<RowCache> rows;
  std::vector<std::int32_t> group_of_layer;
  // The table of the layer's rows: its group's, or a mapped one, numbered after all groups.
  std::vector<std::int32_t> table_of_layer;
  std::vector<std::int32_t> draft_module_of_layer;  // -1: the model's own
  // The tensors of a layer's rows or states, [tensor, last]; -1, -2: it keeps nothing.
  std::vector<std::int32_t> tensor_of_layer;
  std::vector<std::int32_t> last_tensor_of_layer;
  std::vector<StateCache> states;
  std::vector<StateShape> state_shapes;  // of each
  std::vector<RegionRange> states_of_group;
  std::vector<BlockRegion> regions;
  std::vector<RegionRange> regions_of_group;
  std::vector<BlockRegion> poison_regions;
  std::vector<BlockRegion> pages;                 // whole pages
  std::vector<std::int64_t> blocks_per_kv_block;  // per group
  std::vector<MappedTable> mapped_tables;
};

// The plan of `config` is the rank's own, `places` are its layers' in the model (rank_share.h).
// tensor_bases: the address of each tensor of the plan, aligned to 256 bytes. Overlaid tensors are
// contiguous after an aligned first one. Tables stay null.
// `given`: the views that kernels receive; null: those of the plan.
// Errors: those of derive_views; rows without a contiguous region; kernel block sizes that differ
// from the configuration's.
Result<LayerCaches> layer_caches(const BackendConfig& config, std::span<const LayerOfModel> places,
                                 std::span<std::byte* const> tensor_bases,
                                 const PoolViews* given = nullptr);
// The options of the configuration's views.
ViewOptions view_options(const BackendConfig& config);

// Adds the bytes of a tensor that belong to a block: its page, or the K and the V half of a page.
void add_block_ranges(const LayerCaches& layers, std::int32_t tensor, std::int32_t block,
                      std::vector<MemoryRange>& ranges);
// Adds those of all the layer's tensors.
void add_layer_ranges(const LayerCaches& layers, std::size_t layer, std::int32_t block,
                      std::vector<MemoryRange>& ranges);
inline MemoryRange range_in_block(const BlockRegion& region, std::int32_t block) {
  return range_of(region.base + block * region.block_stride, region.size_bytes);
}

}  // namespace lockstep::cuda
