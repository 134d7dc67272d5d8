#include "reference/plan/hisparse_rows.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <vector>

#include "reference/plan/page_size.h"

namespace lockstep {
namespace {

constexpr std::array<std::string_view, 2> kSuffixes = {".hisparse_resident", ".hisparse_hot"};

// Rows of that layer of the source, in pages of the group's own.
Result<KVCacheSpec> rows_like(const KVCacheGroupSpec& source, const std::string& layer_name,
                              const KVCacheSpec& pages) {
  const std::string name = source_layer_of(layer_name);
  const auto at = std::ranges::find(source.layer_names, name);
  if (at == source.layer_names.end() || name == layer_name)
    return fail(fmt::format("{}: expected a layer of {} with {} or {} behind its name", layer_name,
                            kHiSparseSource, kSuffixes[0], kSuffixes[1]));
  KVCacheSpec rows = source.layer_spec(static_cast<std::size_t>(at - source.layer_names.begin()));
  if (rows.block_size != pages.block_size)
    return fail(fmt::format("{}: blocks of {} tokens, and those of {} have {}", layer_name,
                            pages.block_size, name, rows.block_size));
  if (page_size_bytes(rows) != pages.hisparse_page_bytes)
    return fail(fmt::format("{}: pages of {} bytes, and those of {} have {}", layer_name,
                            pages.hisparse_page_bytes, name, page_size_bytes(rows)));
  rows.blocks_per_request = pages.blocks_per_request;
  return rows;
}

Result<KVCacheGroupSpec> device_group(const KVCacheGroupSpec& source, KVCacheGroupSpec group) {
  const KVCacheSpec pages = group.spec;
  group.role = pages.kind == CacheKind::hisparse_hot ? kHiSparseHot : kHiSparseResident;
  group.layer_specs.clear();
  for (const std::string& name : group.layer_names) {
    LS_ASSIGN_OR_RETURN(auto rows, rows_like(source, name, pages));
    group.layer_specs.push_back(std::move(rows));
  }
  if (group.layer_specs.empty()) return fail("groups: one of HiSparse's without a layer");
  group.spec = group.layer_specs.front();
  if (std::ranges::all_of(group.layer_specs,
                          [&](const KVCacheSpec& spec) { return spec == group.spec; }))
    group.layer_specs.clear();
  return group;
}

// Each layer of the source is one of the group's kind, once.
Result<void> check_each_once(const KVCacheConfig& plan, const KVCacheGroupSpec& source,
                             std::string_view role) {
  std::vector<std::string> names;
  for (const KVCacheGroupSpec& group : plan.groups)
    if (group.role == role)
      for (const std::string& name : group.layer_names) names.push_back(source_layer_of(name));
  if (names == source.layer_names) return {};
  return fail(fmt::format("groups: the layers of {} are not those of {}, each once and in order",
                          role, kHiSparseSource));
}

}  // namespace

std::int32_t group_of_role(std::span<const KVCacheGroupSpec> groups, std::string_view role) {
  const auto at = std::ranges::find(groups, role, &KVCacheGroupSpec::role);
  return at == groups.end() ? -1 : static_cast<std::int32_t>(at - groups.begin());
}
bool is_source(const KVCacheGroupSpec& group) { return group.role == kHiSparseSource; }
bool has_hisparse(std::span<const KVCacheGroupSpec> groups) {
  return group_of_role(groups, kHiSparseSource) >= 0;
}

std::string source_layer_of(std::string_view layer_name) {
  for (const std::string_view suffix : kSuffixes)
    if (layer_name.ends_with(suffix)) layer_name.remove_suffix(suffix.size());
  return std::string(layer_name);
}

Result<KVCacheConfig> with_hisparse_rows(KVCacheConfig plan) {
  const std::int32_t at = group_of_role(plan.groups, kHiSparseSource);
  if (at < 0 || plan.groups[at].spec.kind == CacheKind::encoder_only) return plan;
  const KVCacheGroupSpec source = plan.groups[at];
  for (KVCacheGroupSpec& group : plan.groups) {
    if (!is_hisparse(group.spec)) continue;
    LS_ASSIGN_OR_RETURN(group, device_group(source, std::move(group)));
  }
  for (const std::string_view role : {kHiSparseResident, kHiSparseHot})
    LS_RETURN_IF_ERROR(check_each_once(plan, source, role));
  plan.groups[at].spec.kind = CacheKind::encoder_only;
  plan.groups[at].layer_specs.clear();
  return plan;
}

}  // namespace lockstep
