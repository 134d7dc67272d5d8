// HiSparse's groups as memory keeps them. The rows of a source layer lie in up to three places: its
// page of the host pool, a resident page, a slot of a hot region.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "base/result.h"
#include "reference/types/hisparse.h"
#include "reference/types/kv_cache_spec.h"

namespace lockstep {

// The group of that role; -1: there is none.
std::int32_t group_of_role(std::span<const KVCacheGroupSpec> groups, std::string_view role);
// Whether rows live in a host pool.
bool has_hisparse(std::span<const KVCacheGroupSpec> groups);
bool is_source(const KVCacheGroupSpec& group);

// "model.layers.0.attn" of "model.layers.0.attn.hisparse_hot"; any other name as it is.
std::string source_layer_of(std::string_view layer_name);

// The plan with resident pages and hot regions as groups of rows like the source's, under the roles
// kHiSparseResident and kHiSparseHot, and the source as a group that keeps nothing on the device.
// Without HiSparse, or a second time: the plan.
// Refused: resident or hot layers that are not the source's, each once; pages of another size;
// blocks of unlike sizes.
Result<KVCacheConfig> with_hisparse_rows(KVCacheConfig plan);

}  // namespace lockstep
