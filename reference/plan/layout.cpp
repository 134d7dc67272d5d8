#include "reference/plan/layout.h"

#include <algorithm>
#include <map>
#include <string_view>
#include <utility>

#include "base/check.h"
#include "reference/plan/page_size.h"

namespace lockstep {

namespace {

// Only FlashAttention puts the pair before the blocks; a padded page is a page only if its block
// comes first.
bool keeps_pair_outermost(const KVCacheSpec& spec, AttentionBackend chosen) {
  return layer_backend(spec, chosen) == AttentionBackend::flash_attn &&
         (!spec.page_size_padded || *spec.page_size_padded == unpadded_page_size_bytes(spec));
}

// True if K and V of a block must be together in its page although the backend would separate them.
bool pairs_lie_in_page(const KVCacheConfig& config, AttentionBackend chosen, LayoutRule rule) {
  bool states = false;
  std::map<std::string_view, bool> outermost;
  for (const KVCacheGroupSpec& group : config.groups) {
    if (group.layer_names.empty()) continue;  // its layers are in other pipeline stages
    states |= is_state_kind(group.spec.kind);
    if (group.layers_per_page > 1) return true;
    for (std::size_t i = 0; i < group.layer_names.size(); ++i) {
      outermost[group.layer_names[i]] = keeps_pair_outermost(group.layer_spec(i), chosen);
    }
  }
  if (states || rule == LayoutRule::vllm_0_22_1) return states;
  return std::ranges::any_of(config.tensors, [&](const KVCacheTensor& tensor) {
    const auto is_outermost = [&](const std::string& name) { return outermost.at(name); };
    return std::ranges::any_of(tensor.shared_by, is_outermost) &&
           !std::ranges::all_of(tensor.shared_by, is_outermost);
  });
}

// No view can start inside an element.
Result<void> check_aligned(const std::string& name, std::int64_t bytes, DType dtype,
                           std::string_view what) {
  if (bytes % itemsize_bytes(dtype) == 0) return {};
  return fail("{}: {} of {} bytes is no whole number of {} elements; the next that is has {}", name,
              what, bytes, name_of(dtype), round_up(bytes, itemsize_bytes(dtype)));
}

Result<void> set_state_strides(const std::string& name, const KVCacheSpec& spec,
                               LayerLayout& layer) {
  layer.block_stride_bytes = layer.page_size_bytes;
  std::int64_t offset = 0;
  for (const StateTensorSpec& state : spec.states) {
    for (const auto& [bytes, what] : {std::pair{layer.page_size_bytes, "a page"},
                                      std::pair{offset, "an offset in the state page"}})
      if (auto aligned = check_aligned(name, bytes, state.dtype, what); !aligned) return aligned;
    layer.states.push_back({offset, num_elements(state), itemsize_bytes(state.dtype)});
    offset += size_bytes(state);
  }
  return {};
}

// The order of dimensions inside one kernel block, outermost first, is
//   NHD  layer of the pack, kv, token, head, dim                 (every backend)
//   HND  head, layer, kv, token, dim                             (FlashAttention, packed)
//        kv, head, layer, token, dim                             (FlashInfer, Triton, packed)
//        kv, head, token, dim                                    (every backend, not packed)
void set_row_strides(AttentionBackend backend, CacheLayout cache_layout, std::int64_t pack,
                     std::int64_t place, LayerLayout& layer) {
  const std::int64_t row = layer.head_size * layer.element_size_bytes;
  const std::int64_t plane = layer.kernel_block_size * layer.num_kv_heads * row;  // K or V
  layer.kernel_block_stride_bytes = pack * layer.num_kv * plane;
  layer.kv_stride_bytes = plane;
  if (cache_layout == CacheLayout::NHD || layer.num_kv == 1) {
    layer.token_stride_bytes = layer.num_kv_heads * row;
    layer.head_stride_bytes = row;
    layer.base_offset_bytes = place * layer.num_kv * plane;
  } else {
    const std::int64_t run = layer.kernel_block_size * row;  // the tokens of one head
    layer.token_stride_bytes = row;
    if (pack > 1 && backend == AttentionBackend::flash_attn) {
      layer.head_stride_bytes = pack * layer.num_kv * run;
      layer.kv_stride_bytes = run;
      layer.base_offset_bytes = place * layer.num_kv * run;
    } else {
      layer.head_stride_bytes = pack * run;
      layer.kv_stride_bytes = pack * plane;
      layer.base_offset_bytes = place * run;
    }
  }
  layer.block_stride_bytes = layer.page_size_bytes;
  if (layer.pair_order == PairOrder::kv_outermost) {
    layer.kernel_block_stride_bytes = plane;
    layer.block_stride_bytes = plane * layer.blocks_per_kv_block;
    layer.kv_stride_bytes = layer.num_blocks * layer.block_stride_bytes;
  }
}

struct LayerPlace {
  std::int32_t tensor_index = 0;
  std::int64_t place_in_page = 0;
};

// Where each layer's name stands among the tensors. Layers of a packed group that share a tensor
// take places 0, 1, ... in the order of the group.
std::map<std::string_view, LayerPlace> layer_places(const KVCacheConfig& config) {
  std::map<std::string_view, LayerPlace> places;
  for (std::size_t t = 0; t < config.tensors.size(); ++t)
    for (const std::string& name : config.tensors[t].shared_by)
      places[name] = {static_cast<std::int32_t>(t), 0};
  for (const KVCacheGroupSpec& group : config.groups)
    for (std::size_t i = 0; group.layers_per_page > 1 && i < group.layer_names.size(); ++i)
      places.at(group.layer_names[i]).place_in_page =
          static_cast<std::int64_t>(i) % group.layers_per_page;
  return places;
}

Result<LayerLayout> layer_layout(const KVCacheConfig& config, const KVCacheGroupSpec& group,
                                 std::size_t index, LayerPlace place, AttentionBackend chosen,
                                 CacheLayout cache_layout, bool in_page, std::int64_t kernel_size) {
  const KVCacheSpec& spec = group.layer_spec(index);
  LayerLayout layer;
  layer.tensor_index = place.tensor_index;
  layer.tensor_size_bytes = config.tensors[place.tensor_index].size_bytes;
  layer.kind = spec.kind;
  layer.num_blocks = config.num_blocks;
  layer.page_size_bytes = page_size_bytes(spec) * group.layers_per_page;
  layer.real_page_size_bytes = unpadded_page_size_bytes(spec);
  if (layer.tensor_size_bytes != layer.page_size_bytes * config.num_blocks)
    return fail("{}: a tensor of {} bytes for {} blocks of {}", group.layer_names[index],
                layer.tensor_size_bytes, config.num_blocks, layer.page_size_bytes);
  layer.block_size = storage_block_size(spec);
  if (is_state_kind(spec.kind)) {
    LS_RETURN_IF_ERROR(set_state_strides(group.layer_names[index], spec, layer));
    return layer;
  }
  if (auto aligned =
          check_aligned(group.layer_names[index], layer.page_size_bytes, spec.dtype, "a page");
      !aligned)
    return tl::unexpected(aligned.error());
  layer.num_kv = has_single_rows(spec) ? 1 : 2;
  if (layer.num_kv == 2 && head_size_v(spec) != spec.head_size)
    return fail("{}: {} keeps K and V in rows of one length, not {} and {} elements",
                group.layer_names[index], name_of(chosen), spec.head_size, head_size_v(spec));
  layer.num_kv_heads = spec.num_kv_heads;
  layer.head_size = row_elements(spec);
  layer.element_size_bytes = itemsize_bytes(spec.dtype);
  layer.blocks_per_kv_block = spec.block_size / kernel_size;
  layer.kernel_block_size = layer.block_size / layer.blocks_per_kv_block;
  if (keeps_pair_outermost(spec, chosen) && !in_page) layer.pair_order = PairOrder::kv_outermost;
  set_row_strides(*layer_backend(spec, chosen), cache_layout, group.layers_per_page,
                  place.place_in_page, layer);
  return layer;
}

}  // namespace

std::int64_t row_elements(const KVCacheSpec& spec) {
  if (has_single_rows(spec))
    return unpadded_page_size_bytes(spec) /
           (storage_block_size(spec) * spec.num_kv_heads * itemsize_bytes(spec.dtype));
  if (spec.kv_quant_mode == KVQuantMode::nvfp4) return spec.head_size / 2 + spec.head_size / 16;
  if (spec.kv_quant_mode == KVQuantMode::int4_per_token_head) return spec.head_size / 2 + 4;
  if (is_per_token_head(spec.kv_quant_mode)) return spec.head_size + 4 / itemsize_bytes(spec.dtype);
  return spec.head_size;
}

std::vector<ByteExtent> block_extents(const LayerLayout& layer, BlockId block) {
  const std::int64_t begin = index_of(block) * layer.block_stride_bytes;
  if (layer.pair_order == PairOrder::in_page) return {{begin, begin + layer.page_size_bytes}};
  return {
      {begin, begin + layer.block_stride_bytes},
      {begin + layer.kv_stride_bytes, begin + layer.kv_stride_bytes + layer.block_stride_bytes}};
}

Result<PoolLayout> pool_layout(const KVCacheConfig& config, AttentionBackend chosen,
                               CacheLayout cache_layout, LayoutRule rule) {
  PoolLayout pool;
  pool.num_blocks = config.num_blocks;
  for (const KVCacheTensor& tensor : config.tensors)
    pool.tensor_size_bytes.push_back(tensor.size_bytes);
  const bool in_page = pairs_lie_in_page(config, chosen, rule);
  const bool fp32_states = has_fp32_states(config);
  const auto places = layer_places(config);
  for (std::size_t g = 0; g < config.groups.size(); ++g) {
    const KVCacheGroupSpec& group = config.groups[g];
    std::vector<LayerLayout>& layers = pool.groups.emplace_back();
    if (!is_on_device(group)) continue;
    LS_ASSIGN_OR_RETURN(const auto kernel_size, kernel_block_size(group, chosen, fp32_states, g));
    for (std::size_t i = 0; i < group.layer_names.size(); ++i) {
      LS_ASSIGN_OR_RETURN(auto layer,
                          layer_layout(config, group, i, places.at(group.layer_names[i]), chosen,
                                       cache_layout, in_page, kernel_size));
      layers.push_back(std::move(layer));
    }
  }
  return pool;
}

KVCacheConfig with_num_blocks(const KVCacheConfig& config, std::int64_t num_blocks) {
  LS_CHECK(num_blocks > 0 && config.num_blocks > 0, "{} -> {} blocks", config.num_blocks,
           num_blocks);
  KVCacheConfig resized = config;
  resized.num_blocks = num_blocks;
  for (KVCacheTensor& tensor : resized.tensors) {
    LS_CHECK(tensor.size_bytes % config.num_blocks == 0, "{} bytes, {} blocks", tensor.size_bytes,
             config.num_blocks);
    tensor.size_bytes = tensor.size_bytes / config.num_blocks * num_blocks;
  }
  return resized;
}

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
        "a padded page of {} bytes cannot be cut into {} kernel blocks by one stride; use a block "
        "size that the kernel takes whole",
        layer.page_size_bytes, layer.blocks_per_kv_block);
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
  LS_ASSIGN_OR_RETURN(auto layout, pool_layout(config, chosen, cache_layout, rule));
  LS_ASSIGN_OR_RETURN(auto sizes, kernel_block_sizes(config, chosen));
  PoolViews pool;
  pool.tensor_size_bytes = layout.tensor_size_bytes;
  pool.kernel_block_sizes = std::move(sizes);
  for (std::size_t g = 0; g < config.groups.size(); ++g) {
    pool.groups.emplace_back();
    for (std::size_t i = 0; i < layout.groups[g].size(); ++i) {
      auto views = views_of(layout.groups[g][i], config.groups[g].layer_spec(i), chosen);
      if (!views) return fail("{}: {}", config.groups[g].layer_names[i], views.error().message);
      pool.groups.back().push_back(std::move(*views));
    }
  }
  return pool;
}

}  // namespace lockstep
