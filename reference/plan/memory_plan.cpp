#include "reference/plan/memory_plan.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "reference/plan/page_size.h"

namespace lockstep {
namespace {

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

std::int64_t LayerMemory::page_bytes() const {
  std::int64_t bytes = 0;
  for (const BlockRegion& region : regions) bytes += region.bytes;
  return bytes / (last_tensor - tensor + 1);
}

std::vector<std::int64_t> tensor_begins(const std::vector<std::int64_t>& size_bytes) {
  std::vector<std::int64_t> begins{0};
  for (const std::int64_t size : size_bytes) begins.push_back(begins.back() + size);
  return begins;
}

std::vector<PartRows> state_parts(const KVCacheSpec& spec, std::int64_t offset,
                                  std::int64_t block_stride) {
  std::vector<PartRows> parts;
  for (const StateTensorSpec& state : spec.states) {
    const std::int64_t row_bytes = state.dims.back() * itemsize_bytes(state.dtype);
    parts.push_back({.kind = PartKind::state,
                     .part = static_cast<std::int32_t>(parts.size()),
                     .offset = offset,
                     .block_stride = block_stride,
                     .row_stride = row_bytes,
                     .row_bytes = row_bytes,
                     .rows = size_bytes(state) / row_bytes});
    offset += size_bytes(state);
  }
  return parts;
}

TensorView state_view(const StateTensorSpec& state, std::int64_t num_blocks, std::int64_t offset,
                      std::int64_t block_stride) {
  const std::int64_t item = itemsize_bytes(state.dtype);
  TensorView view{state.dtype, {num_blocks}, {block_stride / item}, offset / item};
  std::int64_t stride = num_elements(state);
  for (const std::int64_t dim : state.dims) {
    stride /= dim;
    view.shape.push_back(dim);
    view.stride.push_back(stride);
  }
  return view;
}

std::vector<const LayerMemory*> layers_in(const MemoryPlan& plan, std::size_t group,
                                          std::size_t tensor) {
  std::vector<const LayerMemory*> layers;
  for (const LayerMemory& layer : plan.layers)
    if (layer.group == group && std::cmp_equal(layer.tensor, tensor)) layers.push_back(&layer);
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
