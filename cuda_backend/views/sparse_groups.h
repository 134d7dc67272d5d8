// HiSparse's groups as a worker binds them: resident pages and hot regions are views like those of
// the source's layers, which keep nothing on the device themselves.
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

// The plan with resident and hot groups as caches of MLA, under roles that say which they are.
// Their layers take the source's, one after the other. The source becomes a cache that keeps
// nothing.
// Without HiSparse: the plan. Refused: layers of a kind that are not as many as the source's, and
// pages of another size.
Result<KVCacheConfig> bind_sparse_groups(KVCacheConfig plan);

}  // namespace lockstep::cuda
