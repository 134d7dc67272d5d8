#include "reference/plan/hisparse_rows.h"

#include <algorithm>
#include <vector>

namespace lockstep {
namespace {

// Rows of that layer of the source, in pages of their own.
KVCacheSpec rows_like(const KVCacheGroupSpec& source, const std::string& layer_name,
                      const KVCacheSpec& pages) {
  const auto at = std::ranges::find(source.layer_names, source_layer_of(layer_name));
  KVCacheSpec rows = source.layer_spec(static_cast<std::size_t>(at - source.layer_names.begin()));
  rows.page_size_padded.reset();
  rows.blocks_per_request = pages.blocks_per_request;
  return rows;
}

KVCacheGroupSpec device_group(const KVCacheGroupSpec& source, KVCacheGroupSpec group) {
  const KVCacheSpec pages = group.spec;
  group.role = pages.kind == CacheKind::hisparse_hot ? kHiSparseHot : kHiSparseResident;
  group.layer_specs.clear();
  for (const std::string& name : group.layer_names)
    group.layer_specs.push_back(rows_like(source, name, pages));
  group.spec = group.layer_specs.front();
  if (std::ranges::count(group.layer_specs, group.spec) == std::ssize(group.layer_specs))
    group.layer_specs.clear();
  return group;
}

}  // namespace

std::int32_t group_of_role(std::span<const KVCacheGroupSpec> groups, std::string_view role) {
  const auto at = std::ranges::find(groups, role, &KVCacheGroupSpec::role);
  return at == groups.end() ? -1 : static_cast<std::int32_t>(at - groups.begin());
}

std::string source_layer_of(std::string_view layer_name) {
  for (const std::string_view suffix : {kResidentSuffix, kHotSuffix})
    if (layer_name.ends_with(suffix)) layer_name.remove_suffix(suffix.size());
  return std::string(layer_name);
}

Result<KVCacheConfig> with_hisparse_rows(KVCacheConfig plan) {
  if (!has_hisparse(plan.groups)) return plan;
  KVCacheGroupSpec& first = plan.groups.front();
  if (is_hisparse_source(first) && first.spec.kind == CacheKind::encoder_only) return plan;
  LS_RETURN_IF_ERROR(check_hisparse_groups(plan.groups));
  const KVCacheGroupSpec source = first;
  for (KVCacheGroupSpec& group : plan.groups)
    if (is_hisparse(group.spec)) group = device_group(source, std::move(group));
  first.spec.kind = CacheKind::encoder_only;
  first.layer_specs.clear();
  return plan;
}

}  // namespace lockstep
