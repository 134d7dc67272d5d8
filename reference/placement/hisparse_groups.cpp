#include <fmt/format.h>

#include <algorithm>

#include "reference/placement/cache_groups.h"

namespace lockstep {
namespace {

constexpr std::string_view kHot = ".hisparse_hot", kResident = ".hisparse_resident";

PlacedGroup device_group(const NamedCacheSpecs& layers, std::string_view suffix, CacheKind type,
                         std::int64_t blocks_per_request) {
  PlacedGroup group;
  for (const auto& [name, spec] : layers) group.layer_names.push_back(name + std::string(suffix));
  group.spec.kind = type;
  group.spec.block_size = layers[0].second.block_size;
  group.spec.hisparse_page_bytes = page_bytes(layers[0].second);
  group.spec.blocks_per_request = blocks_per_request;
  group.spec.dcp_sharded = false;
  group.enable_kv_transfer = false;
  return group;
}

}  // namespace

Result<std::vector<PlacedGroup>> hisparse_groups(const NamedCacheSpecs& specs, CacheLayout order,
                                                 const PlacementOptions& options) {
  NamedCacheSpecs sources, indexers, others;
  for (const NamedCacheSpec& layer : specs) {
    if (!has_layer_views(layer.second.kind)) continue;  // laid out again
    if (!is_mla(layer.second.kind))
      others.push_back(layer);
    else
      (layer.second.plan.is_indexer ? indexers : sources).push_back(layer);
  }
  if (sources.empty() || indexers.empty())
    return fail("HiSparse needs sparse MLA layers and their indexers");
  const std::int64_t block = sources[0].second.block_size;
  std::int64_t top_k = 0, indexer_bytes = 0;
  for (const auto& [name, spec] : sources) top_k = std::max(top_k, spec.plan.topk_buffer_width);
  for (const auto& [name, spec] : indexers) indexer_bytes += page_bytes(spec);
  const std::int64_t queries = 1 + options.drafted_tokens();
  const std::int64_t rows = options.hisparse->device_buffer_size.value_or((queries + 1) * top_k);
  if (rows < queries * top_k || rows > 32768)
    return fail(fmt::format("HiSparse: a device buffer of {} rows; {} to 32768 serve this model",
                            rows, queries * top_k));
  std::vector<PlacedGroup> groups(2), resident, hot;
  groups[0] = uniform_group(sources);
  groups[0].host_resident = true;
  groups[0].role = "hisparse_source";
  groups[1] = uniform_group(indexers);
  groups[1].role = "hisparse_indexer";
  NamedCacheSpecs current;
  std::int64_t current_bytes = 0;
  const auto close = [&] {
    resident.push_back(device_group(current, kResident, CacheKind::hisparse_resident, 0));
    hot.push_back(device_group(current, kHot, CacheKind::hisparse_hot, (rows + block - 1) / block));
    current.clear();
    current_bytes = 0;
  };
  // Layers that share an index stay together: a leader opens a unit.
  for (std::size_t i = 0; i < sources.size();) {
    std::size_t end = i + 1;
    while (end < sources.size() && !sources[end].second.plan.is_index_group_leader) ++end;
    std::int64_t unit_bytes = 0;
    for (std::size_t l = i; l < end; ++l) unit_bytes += page_bytes(sources[l].second);
    if (!current.empty() && current_bytes + unit_bytes > indexer_bytes) close();
    for (; i < end; ++i) current.push_back(sources[i]);
    current_bytes += unit_bytes;
  }
  close();
  for (auto& group : resident) groups.push_back(std::move(group));
  for (auto& group : hot) groups.push_back(std::move(group));
  if (!others.empty()) {
    PlacementOptions plain = options;
    plain.hisparse.reset();
    LS_ASSIGN_OR_RETURN(std::vector<PlacedGroup> regular, cache_groups(others, order, plain));
    for (auto& group : regular) groups.push_back(std::move(group));
  }
  return groups;
}

}  // namespace lockstep
