// Which layers share a block table: the rules of vllm/v1/core/kv_cache_planning.py
// (get_kv_cache_groups), the first one that applies.
#pragma once

#include <vector>

#include "base/result.h"
#include "reference/placement/placement.h"

namespace lockstep {

// The groups of the whole model; windows have got their extra_retained_tokens and groups with a
// drafter's layers are marked. An Error: the layers cannot be brought together.
Result<std::vector<KVCacheGroupSpec>> cache_groups(LayerSpecs specs, CacheLayout order,
                                                   const PlacementOptions& options);

// An Error: the layer's block holds no KV entry. The engine divides by the page where it compares
// pages, so it refuses such a layer while grouping, or while planning at the latest.
Result<void> check_page(const std::string& name, const KVCacheSpec& spec);

// Packing (_get_packed_kv_cache_groups): different pages next to each other in one block. Requires
// a block-outer layout and more than one page size.
// An Error: windows or states of different pages that must be split and have different counts.
Result<std::vector<KVCacheGroupSpec>> packed_groups(const LayerSpecs& specs);

// The host group of sparse MLA pages, the indexers, and the resident and hot groups of the device
// (vllm/v1/hisparse/layout.py). Requires MLA layers.
Result<std::vector<KVCacheGroupSpec>> host_page_groups(const LayerSpecs& specs, CacheLayout order,
                                                       const PlacementOptions& options);

}  // namespace lockstep
