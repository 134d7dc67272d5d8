#include "reference/plan/hisparse_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "reference/plan/page_size.h"

namespace lockstep {
namespace {

Result<void> refuse(std::size_t group, std::string_view expected) {
  return fail(fmt::format("groups: group {} next to HiSparse's: expected {}", group, expected));
}

// Of the page only, whatever is next to it in a block.
std::int64_t own_page_bytes(KVCacheSpec spec) {
  spec.page_size_padded.reset();
  return page_size_bytes(with_alignment_padding(spec));
}

// The groups of one kind from `first` on, which partition the source's layers. Returns their end.
Result<std::size_t> check_pages(std::span<const KVCacheGroupSpec> groups, std::size_t first,
                                CacheKind kind, std::string_view suffix) {
  const KVCacheGroupSpec& source = groups[0];
  std::size_t layer = 0, g = first;
  for (; g < groups.size() && groups[g].spec.kind == kind; ++g) {
    const KVCacheSpec& spec = groups[g].spec;
    for (const std::string& name : groups[g].layer_names) {
      const std::string expected =
          layer < source.layer_names.size() ? source.layer_names[layer] + std::string(suffix) : "";
      if (name != expected)
        return fail(fmt::format("groups: layer {} of group {}: expected {}", name, g,
                                expected.empty() ? "no more layers than the source has"
                                                 : expected + ", by the source's order"));
      const std::int64_t bytes = own_page_bytes(source.layer_spec(layer));
      if (spec.block_size != source.spec.block_size || spec.hisparse_page_bytes != bytes)
        return fail(fmt::format(
            "groups: group {}: blocks of {} tokens in pages of {} bytes; the source has {} tokens "
            "in {} bytes",
            g, spec.block_size, spec.hisparse_page_bytes, source.spec.block_size, bytes));
      ++layer;
    }
  }
  if (layer == source.layer_names.size()) return g;
  return fail(fmt::format("groups: {} has no {} among the groups from {} on",
                          source.layer_names[layer], name_of(kind), first));
}

}  // namespace

bool has_hisparse(std::span<const KVCacheGroupSpec> groups) {
  return std::ranges::any_of(groups, [](const KVCacheGroupSpec& group) {
    return is_hisparse_source(group) || is_hisparse(group.spec);
  });
}

Result<void> check_hisparse_groups(std::span<const KVCacheGroupSpec> groups) {
  const auto has_rows = [](const KVCacheGroupSpec& group) {
    return group.spec.kind == CacheKind::mla && group.layers_per_page == 1 &&
           group.spec.compress_ratio == 1;
  };
  if (!is_hisparse_source(groups[0]) || !has_rows(groups[0]))
    return refuse(0, fmt::format("role {} and mla", kHiSparseSource));
  if (groups.size() < 2 || groups[1].role != kHiSparseIndexer || !has_rows(groups[1]) ||
      groups[1].spec.block_size != groups[0].spec.block_size)
    return refuse(
        1, fmt::format("role {} and mla, of blocks as long as the source's", kHiSparseIndexer));
  LS_ASSIGN_OR_RETURN(const std::size_t first_hot,
                      check_pages(groups, 2, CacheKind::hisparse_resident, kResidentSuffix));
  LS_ASSIGN_OR_RETURN(const std::size_t end,
                      check_pages(groups, first_hot, CacheKind::hisparse_hot, kHotSuffix));
  const std::size_t num_resident = first_hot - 2;
  if (end - first_hot != num_resident)
    return refuse(end, fmt::format("as many hot groups as resident ones, {}", num_resident));
  for (std::size_t i = 0; i < num_resident; ++i)
    if (groups[2 + i].layer_names.size() != groups[first_hot + i].layer_names.size())
      return refuse(first_hot + i, fmt::format("the layers of group {}", 2 + i));
  for (std::size_t g = end; g < groups.size(); ++g)
    if (is_hisparse(groups[g].spec) || !groups[g].role.empty())
      return refuse(g, "a cache that is none of HiSparse's");
  return {};
}

}  // namespace lockstep
