#include "reference/placement/offload_regions.h"

#include <algorithm>
#include <set>
#include <utility>

#include "base/check.h"

namespace lockstep {

std::vector<OffloadRegion> simple_offload_regions(const Placement& plan) {
  std::vector<OffloadRegion> regions;
  std::set<std::int64_t> seen;
  for (const PlacedTensor& tensor : plan.tensors) {
    if (tensor.host_resident || !has_layer_views(tensor.spec.kind)) continue;
    const std::int64_t blocks_bytes = plan.num_blocks * tensor.block_stride;
    const bool by_layer = tensor.layer_stride >= blocks_bytes;
    const auto num_layers = std::ssize(tensor.layers);
    const std::int64_t begin = by_layer ? tensor.offset : 0;
    const std::int64_t bytes = by_layer ? num_layers * tensor.layer_stride : blocks_bytes;
    LS_CHECK(bytes % blocks_bytes == 0, "{} bytes are no regions of {}", bytes, blocks_bytes);
    for (std::int64_t i = 0; i < bytes / blocks_bytes; ++i) {
      const std::int64_t address = begin + i * blocks_bytes;
      if (!seen.insert(address).second) continue;
      const std::int64_t layer = by_layer ? i * blocks_bytes / tensor.layer_stride : 0;
      regions.push_back({tensor.layers[static_cast<std::size_t>(layer)], address,
                         tensor.block_stride, tensor.block_stride});
    }
  }
  return regions;
}

bool is_offloaded(const PlacedGroup& group) {
  return !group.host_resident && group.enable_kv_transfer && group.is_prefix_cacheable() &&
         has_layer_views(group.spec.kind);
}

std::vector<OffloadRegion> offloading_regions(const Placement& plan, const WorkerPages& pages) {
  std::vector<OffloadRegion> regions;
  std::set<std::pair<std::int64_t, std::int64_t>> seen;  // address and stride
  for (std::size_t g = 0; g < plan.groups.size(); ++g) {
    if (!is_offloaded(plan.groups[g])) continue;
    for (const std::string& name : plan.groups[g].layer_names) {
      const auto layer = std::ranges::find(pages.layers, name, &LayerPage::name);
      LS_CHECK(layer != pages.layers.end(), "{} has no page", name);
      const std::int64_t bytes = page_bytes(layer->spec);
      const std::int64_t apart = layer->page.block_stride * (layer->page.blocks / pages.num_blocks);
      const std::int64_t stride = is_attention(layer->spec.kind) ? apart : bytes;
      if (stride != bytes) return {{name, 0, stride, stride}};
      if (seen.insert({layer->page.offset, stride}).second)
        regions.push_back({name, layer->page.offset, stride, bytes});
    }
  }
  return regions;
}

}  // namespace lockstep
