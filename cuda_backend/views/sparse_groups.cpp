#include "cuda_backend/views/sparse_groups.h"

#include <fmt/format.h>

#include "cuda_backend/views/views.h"

namespace lockstep::cuda {
namespace {

// Layers [first, ...) of the source, as many as the group has.
Result<void> bind_group(const KVCacheGroupSpec& source, std::size_t first,
                        KVCacheGroupSpec& group) {
  const KVCacheSpec region = group.spec;
  const bool is_hot = is_hot_pages(region.kind);
  group.role = is_hot ? kHiSparseHot : kHiSparseResident;
  for (std::size_t i = 0; i < group.layer_names.size(); ++i) {
    if (first + i >= source.layer_names.size())
      return fail(fmt::format("{}: the source has {} layers", group.layer_names[i],
                              source.layer_names.size()));
    KVCacheSpec rows = source.layer_spec(first + i);
    rows.page_size_padded.reset();
    rows.blocks_per_request = region.blocks_per_request;
    if (const std::int64_t bytes = dense_page_bytes(rows, AttentionBackend::any_size);
        bytes != region.hisparse_page_bytes || rows.block_size != region.block_size)
      return fail(fmt::format("{}: pages of {} bytes for {} tokens, and its rows take {}",
                              group.layer_names[i], region.hisparse_page_bytes, region.block_size,
                              bytes));
    if (i == 0) group.spec = rows;
    if (!(rows == group.spec))
      return fail(fmt::format("{}: rows unlike those of {}", group.layer_names[i],
                              group.layer_names.front()));
  }
  return {};
}

}  // namespace

std::int32_t source_group(std::span<const KVCacheGroupSpec> groups) {
  for (std::size_t g = 0; g < groups.size(); ++g)
    if (is_sparse_source(groups[g])) return static_cast<std::int32_t>(g);
  return -1;
}

Result<KVCacheConfig> bind_sparse_groups(KVCacheConfig plan) {
  const std::int32_t at = source_group(plan.groups);
  if (at < 0) return plan;
  KVCacheGroupSpec& source = plan.groups[static_cast<std::size_t>(at)];
  std::size_t num_resident = 0, num_hot = 0;
  for (KVCacheGroupSpec& group : plan.groups) {
    if (!is_hisparse(group.spec)) continue;
    std::size_t& bound = is_hot_pages(group.spec.kind) ? num_hot : num_resident;
    LS_RETURN_IF_ERROR(bind_group(source, bound, group));
    bound += group.layer_names.size();
  }
  if (num_resident != source.layer_names.size() || num_hot != num_resident)
    return fail(fmt::format("HiSparse: {} resident and {} hot layers for {} of the source",
                            num_resident, num_hot, source.layer_names.size()));
  source.residence = Residence::host;
  source.layer_specs.clear();
  return plan;
}

}  // namespace lockstep::cuda
