#include "reference/plan/page_groups.h"

#include <fmt/format.h>

#include <algorithm>

#include "reference/plan/page_size.h"

namespace lockstep {
namespace {

Result<void> refuse(std::size_t group, std::string_view expected) {
  return fail("groups: group {} next to HiSparse's: expected {}", group, expected);
}

// Of the page only, whatever is next to it in a block.
std::int64_t own_page_bytes(KVCacheSpec spec) {
  spec.page_size_padded.reset();
  return page_size_bytes(with_alignment_padding(spec));
}

// The groups of one kind from `first` on, which partition the source's layers. Returns their end.
Result<std::size_t> check_pages(std::span<const KVCacheGroupSpec> groups, std::size_t first,
                                const PageKind& pages) {
  const auto [kind, suffix] = pages;
  const KVCacheGroupSpec& source = groups[0];
  std::size_t layer = 0, g = first;
  for (; g < groups.size() && groups[g].spec.kind == kind; ++g) {
    const KVCacheSpec& spec = groups[g].spec;
    for (const std::string& name : groups[g].layer_names) {
      const std::string expected =
          layer < source.layer_names.size() ? source.layer_names[layer] + std::string(suffix) : "";
      if (name != expected)
        return fail("groups: layer {} of group {}: expected {}", name, g,
                    expected.empty() ? "no more layers than the source has"
                                     : expected + ", by the source's order");
      const std::int64_t bytes = own_page_bytes(source.layer_spec(layer));
      if (spec.block_size != source.spec.block_size || spec.page_copy_bytes != bytes)
        return fail(
            "groups: group {}: blocks of {} tokens in pages of {} bytes; the source has {} tokens "
            "in {} bytes",
            g, spec.block_size, spec.page_copy_bytes, source.spec.block_size, bytes);
      ++layer;
    }
  }
  if (layer == source.layer_names.size()) return g;
  return fail("groups: {} has no {} among the groups from {} on", source.layer_names[layer],
              name_of(kind), first);
}

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
  group.role = is_hot_pages(pages.kind) ? kHotRole : kResidentRole;
  group.layer_specs.clear();
  for (const std::string& name : group.layer_names)
    group.layer_specs.push_back(rows_like(source, name, pages));
  group.spec = group.layer_specs.front();
  if (std::ranges::count(group.layer_specs, group.spec) == std::ssize(group.layer_specs))
    group.layer_specs.clear();
  return group;
}

}  // namespace

bool has_host_pages(std::span<const KVCacheGroupSpec> groups) {
  return std::ranges::any_of(groups, [](const KVCacheGroupSpec& group) {
    return is_page_source(group) || keeps_pages(group.spec);
  });
}

Result<void> check_page_groups(std::span<const KVCacheGroupSpec> groups) {
  const auto has_rows = [](const KVCacheGroupSpec& group) {
    return is_full_of_latents(group.spec.kind) && group.layers_per_page == 1 &&
           is_one_row(group.spec.tokens_per_state);
  };
  if (!is_page_source(groups[0]) || !has_rows(groups[0]))
    return refuse(0, fmt::format("role {} and mla", kPageSourceRole));
  if (groups.size() < 2 || groups[1].role != kPageIndexerRole || !has_rows(groups[1]) ||
      groups[1].spec.block_size != groups[0].spec.block_size)
    return refuse(
        1, fmt::format("role {} and mla, of blocks as long as the source's", kPageIndexerRole));
  LS_ASSIGN_OR_RETURN(const std::size_t first_hot, check_pages(groups, 2, kResidentPages));
  LS_ASSIGN_OR_RETURN(const std::size_t end, check_pages(groups, first_hot, kHotPages));
  const std::size_t num_resident = first_hot - 2;
  if (end - first_hot != num_resident)
    return refuse(end, fmt::format("as many hot groups as resident ones, {}", num_resident));
  for (std::size_t i = 0; i < num_resident; ++i)
    if (groups[2 + i].layer_names.size() != groups[first_hot + i].layer_names.size())
      return refuse(first_hot + i, fmt::format("the layers of group {}", 2 + i));
  for (std::size_t g = end; g < groups.size(); ++g)
    if (keeps_pages(groups[g].spec) || !groups[g].role.empty())
      return refuse(g, "a cache that is not one of HiSparse's");
  return {};
}

std::string source_layer_of(std::string_view layer_name) {
  for (const std::string_view suffix : {kResidentSuffix, kHotSuffix})
    if (layer_name.ends_with(suffix)) layer_name.remove_suffix(suffix.size());
  return std::string(layer_name);
}

Result<KVCacheConfig> with_page_rows(KVCacheConfig plan) {
  if (!has_host_pages(plan.groups)) return plan;
  KVCacheGroupSpec& first = plan.groups.front();
  if (is_page_source(first) && !is_on_device(first)) return plan;
  LS_RETURN_IF_ERROR(check_page_groups(plan.groups));
  const KVCacheGroupSpec source = first;
  for (KVCacheGroupSpec& group : plan.groups)
    if (keeps_pages(group.spec)) group = device_group(source, std::move(group));
  first.residence = Residence::host;
  first.layer_specs.clear();
  return plan;
}

}  // namespace lockstep
