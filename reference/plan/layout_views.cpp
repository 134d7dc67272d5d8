#include "reference/plan/layout_views.h"

#include <fmt/core.h>

#include "reference/plan/kernel_blocks.h"
#include "reference/plan/page_size.h"

namespace lockstep {
namespace {

LayerViews state_views(const LayerLayout& layer, const KVCacheSpec& spec) {
  LayerViews views;
  for (std::size_t s = 0; s < spec.states.size(); ++s) {
    const StateTensorSpec& state = spec.states[s];
    TensorView& view = views.tensors.emplace_back();
    view.dtype = state.dtype;
    view.storage_offset = layer.states[s].offset_bytes / layer.states[s].itemsize_bytes;
    view.shape = {layer.num_blocks};
    view.stride = {layer.page_size_bytes / layer.states[s].itemsize_bytes};
    std::int64_t stride = num_elements(state);
    for (std::int64_t dim : state.dims) {
      stride /= dim;
      view.shape.push_back(dim);
      view.stride.push_back(stride);
    }
  }
  return views;
}

}  // namespace

Result<LayerViews> views_of(const LayerLayout& layer, const KVCacheSpec& spec,
                            AttentionBackend chosen) {
  if (is_state_kind(spec.kind)) return state_views(layer, spec);
  if (layer.block_stride_bytes != layer.kernel_block_stride_bytes * layer.blocks_per_kv_block &&
      layer.blocks_per_kv_block > 1)
    return fail(
        fmt::format("a padded page of {} bytes cannot be cut into {} kernel blocks by one "
                    "stride; use a block size that the kernel takes whole",
                    layer.page_size_bytes, layer.blocks_per_kv_block));
  const std::int64_t kernel_block_stride =
      layer.blocks_per_kv_block > 1 ? layer.kernel_block_stride_bytes : layer.block_stride_bytes;
  LayerViews views;
  views.kernel_block_size = layer.kernel_block_size;
  views.blocks_per_kv_block = layer.blocks_per_kv_block;
  TensorView& view = views.tensors.emplace_back();
  view.dtype = spec.dtype;
  view.storage_offset = layer.base_offset_bytes / layer.element_size_bytes;
  const auto add = [&](std::int32_t& role, std::int64_t size, std::int64_t stride_bytes) {
    role = static_cast<std::int32_t>(view.shape.size());
    view.shape.push_back(size);
    view.stride.push_back(stride_bytes / layer.element_size_bytes);
  };
  const auto add_blocks = [&] {
    add(views.block_dim, layer.num_blocks * layer.blocks_per_kv_block, kernel_block_stride);
  };
  const AttentionBackend backend = *layer_backend(spec, chosen);
  if (backend != AttentionBackend::flash_attn) add_blocks();
  if (layer.num_kv == 2) add(views.kv_dim, 2, layer.kv_stride_bytes);
  if (backend == AttentionBackend::flash_attn) add_blocks();
  add(views.token_dim, layer.kernel_block_size, layer.token_stride_bytes);
  if (layer.num_kv == 2 || backend == AttentionBackend::cache_only)
    add(views.head_dim, layer.num_kv_heads, layer.head_stride_bytes);
  std::int32_t row = 0;
  add(row, layer.head_size, layer.element_size_bytes);
  return views;
}

Result<PoolViews> pool_views(const KVCacheConfig& config, AttentionBackend chosen,
                             CacheLayout cache_layout, LayoutRule rule) {
  auto layout = pool_layout(config, chosen, cache_layout, rule);
  if (!layout) return tl::unexpected(layout.error());
  auto sizes = kernel_block_sizes(config, chosen);
  if (!sizes) return tl::unexpected(sizes.error());
  PoolViews pool;
  pool.tensor_size_bytes = layout->tensor_size_bytes;
  pool.kernel_block_sizes = std::move(*sizes);
  for (std::size_t g = 0; g < config.groups.size(); ++g) {
    pool.groups.emplace_back();
    for (std::size_t i = 0; i < layout->groups[g].size(); ++i) {
      auto views = views_of(layout->groups[g][i], config.groups[g].layer_spec(i), chosen);
      if (!views)
        return fail(fmt::format("{}: {}", config.groups[g].layer_names[i], views.error().message));
      pool.groups.back().push_back(std::move(*views));
    }
  }
  return pool;
}

}  // namespace lockstep
