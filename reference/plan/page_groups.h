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
#include <string>
#include <string_view>

#include "base/result.h"
#include "reference/types/host_pages.h"
#include "reference/types/kv_cache_spec.h"

namespace lockstep {

inline constexpr std::string_view kResidentSuffix = ".hisparse_resident";
inline constexpr std::string_view kHotSuffix = ".hisparse_hot";
struct PageKind {
  CacheKind kind;
  std::string_view suffix;  // of its layers' names
};
inline constexpr PageKind kResidentPages{CacheKind::hisparse_resident, kResidentSuffix};
inline constexpr PageKind kHotPages{CacheKind::hisparse_hot, kHotSuffix};

// Whether blocks of the group are those of the host pool.
inline bool is_page_source(const KVCacheGroupSpec& group) { return group.role == kPageSourceRole; }
bool has_host_pages(std::span<const KVCacheGroupSpec> groups);

// Refused: a plan of another shape. REQUIRES: has_host_pages(groups).
Result<void> check_page_groups(std::span<const KVCacheGroupSpec> groups);

// "model.layers.0.attn" of "model.layers.0.attn.hisparse_hot"; any other name as it is.
std::string source_layer_of(std::string_view layer_name);

// The plan as memory keeps it, where the rows of a source layer lie in up to three places: its page
// of the host pool, a resident page, a slot of a hot region. Resident pages and hot regions are
// groups of rows like the source's, under the roles kResidentRole and kHotRole, and the
// source resides on the host.
// Without HiSparse, or a second time: the plan. Refused: what check_page_groups() refuses.
Result<KVCacheConfig> with_page_rows(KVCacheConfig plan);

}  // namespace lockstep
