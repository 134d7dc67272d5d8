// HiSparse's groups as memory keeps them. The rows of a source layer lie in up to three places: its
// page of the host pool, a resident page, a slot of a hot region.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "base/result.h"
#include "reference/plan/hisparse_plan.h"
#include "reference/types/kv_cache_spec.h"

namespace lockstep {

// The group of that role; -1: there is none.
std::int32_t group_of_role(std::span<const KVCacheGroupSpec> groups, std::string_view role);

// "model.layers.0.attn" of "model.layers.0.attn.hisparse_hot"; any other name as it is.
std::string source_layer_of(std::string_view layer_name);

// The plan with resident pages and hot regions as groups of rows like the source's, under the roles
// kHiSparseResident and kHiSparseHot, and the source as a group that keeps nothing on the device.
// Without HiSparse, or a second time: the plan. Refused: what check_hisparse_groups() refuses.
Result<KVCacheConfig> with_hisparse_rows(KVCacheConfig plan);

}  // namespace lockstep
