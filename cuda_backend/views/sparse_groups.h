// HiSparse's groups as a worker binds them: resident pages and hot regions have the views of the
// source's layers. The source itself keeps nothing on the device.
#pragma once

#include <cstdint>
#include <span>

#include "base/result.h"
#include "reference/types/hisparse.h"
#include "reference/types/kv_cache_spec.h"

namespace lockstep::cuda {

// The group of HiSparse's source; -1: there is none.
std::int32_t source_group(std::span<const KVCacheGroupSpec> groups);

inline bool is_sparse_source(const KVCacheGroupSpec& group) {
  return group.role == kHiSparseSource;
}
inline bool is_resident_pages(const KVCacheGroupSpec& group) {
  return group.role == kHiSparseResident;
}
inline bool is_hot_region(const KVCacheGroupSpec& group) { return group.role == kHiSparseHot; }

// Returns the plan with resident and hot groups as MLA caches, marked by their roles. Their layers
// take the specs of the source's layers, in order. The source becomes a cache without memory.
// Without HiSparse: the plan. Refused: resident or hot layers whose number or page size differs
// from the source's.
Result<KVCacheConfig> bind_sparse_groups(KVCacheConfig plan);

}  // namespace lockstep::cuda
