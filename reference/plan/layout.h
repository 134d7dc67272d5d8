// The memory of a plan with one tensor per layer of a group (releases before 0.33.0), in closed
// form: the oracle that views, kernels and the memory model are compared with.
//
// A block owns one page of each tensor, or two half pages where K and V are apart. Padding and the
// room of absent pack members belong to the block and are never addressed.
#pragma once

#include <cstdint>

#include "base/result.h"
#include "reference/plan/memory_plan.h"
#include "reference/types/view_types.h"

namespace lockstep {

// Elements of one row as the backend shapes it: head_size, plus inline scales, or a layout in
// bytes.
std::int64_t row_elements(const KVCacheSpec& spec);

// Every layer of the plan. Refused: a cache that the backend cannot shape (with the reason).
Result<MemoryPlan> pool_layout(const KVCacheConfig& config, AttentionBackend chosen,
                               CacheLayout cache_layout, LayoutRule rule = LayoutRule::isolated);

// The same plan with another number of blocks: tensors grow or shrink in proportion.
KVCacheConfig with_num_blocks(const KVCacheConfig& config, std::int64_t num_blocks);

// The same as strided views, in the dimensions that each layer's backend names: what a recording of
// views is compared with, and what a person reads. A token cache has one view, states one a tensor.
// Refused: kernel blocks that one stride cannot reach (a padded page that is split).
Result<PoolViews> pool_views(const KVCacheConfig& config, AttentionBackend chosen,
                             CacheLayout cache_layout, LayoutRule rule = LayoutRule::isolated);

}  // namespace lockstep
