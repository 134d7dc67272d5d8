// The shape of HiSparse's groups in a plan (vllm/v1/hisparse/layout.py): which device layers hold
// pages of which host layer.
//
// 1. Group 0 has role hisparse_source and rows of MLA: its blocks are the host pool's. Group 1 has
//    role hisparse_indexer, rows of MLA and blocks of the same length.
// 2. Groups of kind hisparse_resident follow, then as many of hisparse_hot. Each kind has every
//    layer of the source once, in its order, cut into groups at the same layers, under the layer's
//    name with a suffix of the kind.
// 3. Their blocks and pages are the source's.
// Other groups follow.
#pragma once

#include <span>
#include <string_view>

#include "base/result.h"
#include "reference/types/hisparse.h"
#include "reference/types/kv_cache_spec.h"

namespace lockstep {

inline constexpr std::string_view kResidentSuffix = ".hisparse_resident";
inline constexpr std::string_view kHotSuffix = ".hisparse_hot";

// Whether blocks of the group are those of the host pool.
inline bool is_hisparse_source(const KVCacheGroupSpec& group) {
  return group.role == kHiSparseSource;
}
bool has_hisparse(std::span<const KVCacheGroupSpec> groups);

// Refused: a plan of another shape. REQUIRES: has_hisparse(groups).
Result<void> check_hisparse_groups(std::span<const KVCacheGroupSpec> groups);

}  // namespace lockstep
