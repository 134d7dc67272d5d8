#include "reference/memory/memory_plan.h"

#include <algorithm>

#include "base/check.h"

namespace lockstep {
namespace {

std::vector<PartRows> parts_of(const LayerLayout& layer, const KVCacheSpec& spec,
                               std::int64_t base) {
  std::vector<PartRows> parts;
  for (std::size_t s = 0; s < layer.states.size(); ++s) {
    const StateLayout& state = layer.states[s];
    const std::int64_t inner = spec.states[s].dims.back();
    const std::int64_t row_bytes = inner * state.itemsize_bytes;
    parts.push_back({.kind = PartKind::state,
                     .part = static_cast<std::int32_t>(s),
                     .offset = base + state.offset_bytes,
                     .block_stride = layer.block_stride_bytes,
                     .row_stride = row_bytes,
                     .row_bytes = row_bytes,
                     .rows = state.num_elements / inner});
  }
  const std::int64_t size = layer.tensor_size_bytes;
  for (std::int64_t kv = 0; kv < layer.num_kv; ++kv)
    parts.push_back({.kind = layer.num_kv == 1 ? PartKind::row
                             : kv == 0         ? PartKind::k
                                               : PartKind::v,
                     .offset = base + layer.base_offset_bytes +
                               kv * (layer.kv_stride_bytes + layer.kv_tensor_step * size),
                     .block_stride = layer.block_stride_bytes,
                     .kernel_block_stride = layer.kernel_block_stride_bytes,
                     .head_stride = layer.head_stride_bytes + layer.head_tensor_step * size,
                     .row_stride = layer.token_stride_bytes,
                     .row_bytes = layer.head_size * layer.element_size_bytes,
                     .kernel_blocks = layer.block_size / layer.kernel_block_size,
                     .heads = layer.num_kv_heads,
                     .rows = layer.kernel_block_size});
  return parts;
}

// The strides of the plan's order in closed form.
PartRows rows_of(CacheLayout order, const PlacedTensor& tensor, std::int64_t index,
                 const CachePage& page, std::int64_t num_blocks) {
  const std::int64_t splits = page.blocks / num_blocks;
  const std::int64_t row = page.content_bytes, head = page.rows * row;
  PartRows part{.offset = tensor.offset + index * tensor.layer_stride,
                .block_stride = tensor.block_stride / splits * splits,
                .kernel_block_stride = tensor.block_stride / splits,
                .head_stride = head,
                .row_stride = row,
                .row_bytes = row,
                .kernel_blocks = splits,
                .heads = page.heads,
                .rows = page.rows};
  switch (order) {
    case CacheLayout::LBNHC:
    case CacheLayout::BLNHC:
      part.head_stride = row;
      part.row_stride = page.heads * row;
      break;
    case CacheLayout::LBHNC:
    case CacheLayout::BLHNC:
      break;
    case CacheLayout::LHBNC:
      part.head_stride = page.blocks * head;
      break;
    case CacheLayout::BHLNC:
      part.head_stride = std::ssize(tensor.layers) * head;
      break;
    case CacheLayout::NHD:
    case CacheLayout::HND:
      LS_CHECK(false, "{} is no order of an allocation", name_of(order));
  }
  return part;
}

std::vector<PartRows> parts_of(const PartRows& page, const KVCacheSpec& spec) {
  if (!is_state_kind(spec.kind)) return {page};
  std::vector<PartRows> parts;
  PartRows part = page;
  part.kind = PartKind::state;
  for (const StateTensorSpec& state : spec.states) {
    part.row_bytes = size_bytes(state);
    parts.push_back(part);
    part.offset += part.row_bytes;
    ++part.part;
  }
  return parts;
}

std::vector<BlockRegion> regions_of(const Placement& plan, const PlacedTensor& tensor,
                                    const PartRows& page) {
  if (is_block_outermost(plan.order)) return {{0, tensor.block_stride, tensor.block_stride}};
  const std::int64_t bytes = tensor.layer_stride / plan.num_blocks;
  if (plan.order != CacheLayout::LHBNC) return {{page.offset, bytes, page.block_stride}};
  std::vector<BlockRegion> regions;
  for (std::int64_t h = 0; h < page.heads; ++h)
    regions.push_back({page.offset + h * page.head_stride, bytes / page.heads, page.block_stride});
  return regions;
}

// Byte of the block, its regions laid end to end.
std::int64_t place_in_block(const std::vector<BlockRegion>& regions, std::int64_t byte) {
  std::int64_t before = 0;
  for (const BlockRegion& region : regions) {
    if (byte >= region.begin && byte < region.begin + region.bytes)
      return before + byte - region.begin;
    before += region.bytes;
  }
  LS_CHECK(false, "byte {} is not the block's", byte);
  return 0;
}

std::vector<BlockRegion> regions_of(const std::vector<const LayerMemory*>& layers) {
  std::vector<BlockRegion> all;
  for (const LayerMemory* layer : layers)
    for (const BlockRegion& region : layer->regions)
      if (std::ranges::find(all, region) == all.end()) all.push_back(region);
  return all;
}

}  // namespace

MemoryPlan memory_plan(const KVCacheConfig& config, const PoolLayout& pool) {
  MemoryPlan plan;
  plan.num_blocks = pool.num_blocks;
  plan.tensor_size_bytes = pool.tensor_size_bytes;
  std::vector<std::int64_t> begins{0};
  for (const std::int64_t size : pool.tensor_size_bytes) begins.push_back(begins.back() + size);
  for (std::size_t g = 0; g < pool.groups.size(); ++g) {
    plan.layers_per_page.push_back(config.groups[g].layers_per_page);
    for (std::size_t i = 0; i < pool.groups[g].size(); ++i) {
      const LayerLayout& layer = pool.groups[g][i];
      if (layer.page_size_bytes == 0) continue;
      const auto first = static_cast<std::size_t>(layer.tensor_index);
      LayerMemory& at = plan.layers.emplace_back();
      at.name = config.groups[g].layer_names[i];
      at.group = g;
      at.layer = i;
      at.tensor = first;
      at.end = begins[static_cast<std::size_t>(last_tensor_of(layer)) + 1];
      at.parts = parts_of(layer, config.groups[g].layer_spec(i), begins[first]);
      for (auto t = first; t <= static_cast<std::size_t>(last_tensor_of(layer)); ++t)
        for (const ByteExtent& extent : block_extents(layer, BlockId{0}))
          at.regions.push_back(
              {begins[t] + extent.begin, extent.end - extent.begin, layer.block_stride_bytes});
    }
  }
  return plan;
}

MemoryPlan memory_plan(const Placement& placed, const WorkerPages& pages) {
  MemoryPlan plan;
  plan.num_blocks = pages.num_blocks;
  plan.tensor_size_bytes = {pages.device_bytes};
  plan.layers_per_page.assign(placed.groups.size(), 1);
  std::size_t index = 0;
  for (const PlacedTensor& tensor : placed.tensors) {
    if (!has_layer_views(tensor.spec.kind)) continue;
    for (std::size_t l = 0; l < tensor.layers.size(); ++l, ++index) {
      if (tensor.host_resident) continue;
      const LayerPage& layer = pages.layers[index];
      LS_CHECK(layer.name == tensor.layers[l], "{} has the page of {}", tensor.layers[l],
               layer.name);
      const PartRows page =
          rows_of(placed.order, tensor, static_cast<std::int64_t>(l), layer.page, pages.num_blocks);
      plan.layers.push_back({.name = layer.name,
                             .group = layer.group,
                             .layer = index,
                             .end = pages.device_bytes,
                             .parts = parts_of(page, layer.spec),
                             .regions = regions_of(placed, tensor, page)});
    }
  }
  return plan;
}

std::vector<const LayerMemory*> layers_in(const MemoryPlan& plan, std::size_t group,
                                          std::size_t tensor) {
  std::vector<const LayerMemory*> layers;
  for (const LayerMemory& layer : plan.layers)
    if (layer.group == group && layer.tensor == tensor) layers.push_back(&layer);
  return layers;
}

std::vector<BlockRun> row_runs(const MemoryPlan& plan, std::size_t group, std::size_t tensor) {
  const auto layers = layers_in(plan, group, tensor);
  const auto regions = regions_of(layers);
  std::vector<BlockRun> runs;
  for (std::size_t i = 0; i < layers.size(); ++i)
    for (const PartRows& part : layers[i]->parts)
      for (std::int64_t k = 0; k < part.kernel_blocks; ++k) {
        std::vector<std::int64_t> begins;
        for (std::int64_t h = 0; h < part.heads; ++h)
          for (std::int64_t n = 0; n < part.rows; ++n)
            begins.push_back(byte_of(part, {0, k, h, n}));
        std::ranges::sort(begins);
        for (std::size_t first = 0; first < begins.size();) {
          std::size_t end = first + 1;
          while (end < begins.size() && begins[end] == begins[end - 1] + part.row_bytes) ++end;
          const std::int64_t at = place_in_block(regions, begins[first]);
          runs.push_back({at, at + static_cast<std::int64_t>(end - first) * part.row_bytes,
                          part.kind, part.part, static_cast<std::int32_t>(i)});
          first = end;
        }
      }
  std::ranges::sort(runs, {}, &BlockRun::begin);
  return runs;
}

std::vector<BlockRun> block_runs(const MemoryPlan& plan, std::size_t group, std::size_t tensor) {
  const auto layers = layers_in(plan, group, tensor);
  if (layers.empty()) return {};
  std::int64_t block_bytes = 0;
  for (const BlockRegion& region : regions_of(layers)) block_bytes += region.bytes;
  const PartKind gap =
      std::ssize(layers) < plan.layers_per_page[group] ? PartKind::empty_place : PartKind::padding;
  std::vector<BlockRun> runs;
  std::int64_t reached = 0;
  for (const BlockRun& run : row_runs(plan, group, tensor)) {
    LS_CHECK(run.begin >= reached, "bytes {} to {} have two owners", run.begin, reached);
    if (run.begin > reached) runs.push_back({reached, run.begin, gap});
    BlockRun* const last = runs.empty() ? nullptr : &runs.back();
    if (last != nullptr && last->kind == run.kind && last->layer == run.layer &&
        last->part == run.part)
      last->end = run.end;
    else
      runs.push_back(run);
    reached = run.end;
  }
  if (reached < block_bytes) runs.push_back({reached, block_bytes, gap});
  return runs;
}

}  // namespace lockstep
