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
    for (std::size_t i = 0; i < group.layer_names.size(); ++i)
      outermost[group.layer_names[i]] = keeps_pair_outermost(group.layer_spec(i), chosen);
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

Result<void> set_states(const std::string& name, const KVCacheSpec& spec, std::int64_t page,
                        LayerMemory& layer) {
  layer.parts = state_parts(spec, layer.begin, page);
  for (std::size_t s = 0; s < spec.states.size(); ++s)
    for (const auto& [bytes, what] :
         {std::pair{page, "a page"},
          std::pair{layer.parts[s].offset - layer.begin, "an offset in the state page"}})
      LS_RETURN_IF_ERROR(check_aligned(name, bytes, spec.states[s].dtype, what));
  return {};
}

// What all layers of a plan share.
struct Pool {
  const KVCacheConfig& config;
  AttentionBackend chosen;
  CacheLayout layout;
  bool in_page;
  std::vector<std::int64_t> begins;  // of tensors
};

// The order of dimensions inside one kernel block, outermost first, is
//   NHD  layer of the pack, kv, token, head, dim                 (every backend)
//   HND  head, layer, kv, token, dim                             (FlashAttention, packed)
//        kv, head, layer, token, dim                             (FlashInfer, Triton, packed)
//        kv, head, token, dim                                    (every backend, not packed)
void set_rows(const Pool& pool, AttentionBackend backend, std::int64_t pack, std::int64_t place,
              bool is_apart, PartRows rows, LayerMemory& layer) {
  const bool is_pair = rows.kind == PartKind::k;
  const std::int64_t num_kv = is_pair ? 2 : 1, row = rows.row_bytes;
  const std::int64_t plane = rows.rows * rows.heads * row;  // K or V
  std::int64_t from_k_to_v = plane;
  rows.offset = layer.begin;
  rows.block_stride = layer.page_bytes();
  rows.kernel_block_stride = pack * num_kv * plane;
  if (pool.layout == CacheLayout::NHD || !is_pair) {
    rows.row_stride = rows.heads * row;
    rows.head_stride = row;
    rows.offset += place * num_kv * plane;
  } else {
    const std::int64_t run = rows.rows * row;  // the tokens of one head
    const bool is_by_head = pack > 1 && backend == AttentionBackend::flash_attn;
    rows.row_stride = row;
    rows.head_stride = is_by_head ? pack * num_kv * run : pack * run;
    from_k_to_v = is_by_head ? run : pack * plane;
    rows.offset += place * (is_by_head ? num_kv * run : run);
  }
  if (is_apart) {
    rows.kernel_block_stride = plane;
    rows.block_stride = plane * rows.kernel_blocks;
    from_k_to_v = pool.config.num_blocks * rows.block_stride;
    layer.regions = {{layer.begin, rows.block_stride, rows.block_stride},
                     {layer.begin + from_k_to_v, rows.block_stride, rows.block_stride}};
  }
  layer.parts = {rows};
  if (!is_pair) return;
  rows.kind = PartKind::v;
  rows.offset += from_k_to_v;
  layer.parts.push_back(rows);
}

Result<LayerMemory> layer_memory(const Pool& pool, std::size_t g, std::size_t index,
                                 std::int32_t tensor, std::int64_t kernel_size) {
  const KVCacheConfig& config = pool.config;
  const KVCacheGroupSpec& group = config.groups[g];
  const KVCacheSpec& spec = group.layer_spec(index);
  const std::string& name = group.layer_names[index];
  const std::int64_t tensor_bytes = config.tensors[tensor].size_bytes;
  const std::int64_t page = page_size_bytes(spec) * group.layers_per_page;
  if (tensor_bytes != page * config.num_blocks)
    return fail("{}: a tensor of {} bytes for {} blocks of {}", name, tensor_bytes,
                config.num_blocks, page);
  LayerMemory layer{.name = name, .group = g, .layer = index};
  layer.tensor = layer.last_tensor = tensor;
  layer.begin = pool.begins[tensor];
  layer.end = layer.begin + tensor_bytes;
  layer.regions = {{layer.begin, page, page}};
  if (is_state_kind(spec.kind)) {
    LS_RETURN_IF_ERROR(set_states(name, spec, page, layer));
    return layer;
  }
  LS_RETURN_IF_ERROR(check_aligned(name, page, spec.dtype, "a page"));
  if (!has_single_rows(spec) && head_size_v(spec) != spec.head_size)
    return fail("{}: {} keeps K and V in rows of one length, not {} and {} elements", name,
                name_of(pool.chosen), spec.head_size, head_size_v(spec));
  PartRows rows{.kind = has_single_rows(spec) ? PartKind::row : PartKind::k};
  rows.row_bytes = row_elements(spec) * itemsize_bytes(spec.dtype);
  rows.kernel_blocks = spec.block_size / kernel_size;
  rows.heads = spec.num_kv_heads;
  rows.rows = storage_block_size(spec) / rows.kernel_blocks;
  // Layers of a packed group that share a tensor take places 0, 1, ... in the order of the group.
  const std::int64_t place = static_cast<std::int64_t>(index) % group.layers_per_page;
  set_rows(pool, *layer_backend(spec, pool.chosen), group.layers_per_page, place,
           keeps_pair_outermost(spec, pool.chosen) && !pool.in_page, rows, layer);
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

Result<MemoryPlan> pool_layout(const KVCacheConfig& config, AttentionBackend chosen,
                               CacheLayout cache_layout, LayoutRule rule) {
  MemoryPlan plan;
  plan.num_blocks = config.num_blocks;
  for (const KVCacheTensor& tensor : config.tensors)
    plan.tensor_size_bytes.push_back(tensor.size_bytes);
  const Pool pool{config, chosen, cache_layout, pairs_lie_in_page(config, chosen, rule),
                  tensor_begins(plan.tensor_size_bytes)};
  const bool fp32_states = has_fp32_states(config);
  std::map<std::string_view, std::int32_t> tensors;
  for (std::size_t t = 0; t < config.tensors.size(); ++t)
    for (const std::string& name : config.tensors[t].shared_by)
      tensors[name] = static_cast<std::int32_t>(t);
  for (std::size_t g = 0; g < config.groups.size(); ++g) {
    const KVCacheGroupSpec& group = config.groups[g];
    plan.layers_per_page.push_back(group.layers_per_page);
    if (!is_on_device(group)) continue;
    LS_ASSIGN_OR_RETURN(const auto kernel_size, kernel_block_size(group, chosen, fp32_states, g));
    for (std::size_t i = 0; i < group.layer_names.size(); ++i) {
      LS_ASSIGN_OR_RETURN(plan.layers.emplace_back(),
                          layer_memory(pool, g, i, tensors.at(group.layer_names[i]), kernel_size));
    }
  }
  return plan;
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

// `backend`: the layer's own (layer_backend); it says only in which order dimensions are named.
Result<LayerViews> row_views(const LayerMemory& layer, const KVCacheSpec& spec,
                             AttentionBackend backend, std::int64_t num_blocks) {
  const PartRows& rows = layer.parts.front();
  const bool is_pair = layer.parts.size() == 2;
  if (rows.kernel_blocks > 1 && rows.block_stride != rows.kernel_block_stride * rows.kernel_blocks)
    return fail(
        "a padded page of {} bytes cannot be cut into {} kernel blocks by one stride; use a block "
        "size that the kernel takes whole",
        layer.page_bytes(), rows.kernel_blocks);
  LayerViews views{.kernel_block_size = rows.rows, .blocks_per_kv_block = rows.kernel_blocks};
  const std::int64_t item = itemsize_bytes(spec.dtype);
  TensorView& view = views.tensors.emplace_back();
  view.dtype = spec.dtype;
  view.storage_offset = (rows.offset - layer.begin) / item;
  const auto add = [&](std::int32_t& role, std::int64_t size, std::int64_t stride_bytes) {
    role = static_cast<std::int32_t>(view.shape.size());
    view.shape.push_back(size);
    view.stride.push_back(stride_bytes / item);
  };
  const auto add_blocks = [&] {
    add(views.block_dim, num_blocks * rows.kernel_blocks,
        rows.kernel_blocks > 1 ? rows.kernel_block_stride : rows.block_stride);
  };
  if (backend != AttentionBackend::flash_attn) add_blocks();
  if (is_pair) add(views.kv_dim, 2, layer.parts.back().offset - rows.offset);
  if (backend == AttentionBackend::flash_attn) add_blocks();
  add(views.token_dim, rows.rows, rows.row_stride);
  if (is_pair || backend == AttentionBackend::cache_only)
    add(views.head_dim, rows.heads, rows.head_stride);
  std::int32_t row = 0;
  add(row, rows.row_bytes / item, item);
  return views;
}

}  // namespace

Result<PoolViews> pool_views(const KVCacheConfig& config, AttentionBackend chosen,
                             CacheLayout cache_layout, LayoutRule rule) {
  LS_ASSIGN_OR_RETURN(const MemoryPlan plan, pool_layout(config, chosen, cache_layout, rule));
  LS_ASSIGN_OR_RETURN(auto sizes, kernel_block_sizes(config, chosen));
  PoolViews pool{.tensor_size_bytes = plan.tensor_size_bytes,
                 .kernel_block_sizes = std::move(sizes)};
  pool.groups.resize(config.groups.size());
  for (const LayerMemory& layer : plan.layers) {
    const KVCacheSpec& spec = config.groups[layer.group].layer_spec(layer.layer);
    LayerViews& views = pool.groups[layer.group].emplace_back();
    if (!layer.keeps_rows()) {
      for (std::size_t i = 0; i < spec.states.size(); ++i)
        views.tensors.push_back(state_view(spec.states[i], plan.num_blocks,
                                           layer.parts[i].offset - layer.begin,
                                           layer.page_bytes()));
      continue;
    }
    auto rows = row_views(layer, spec, *layer_backend(spec, chosen), plan.num_blocks);
    if (!rows) return fail("{}: {}", layer.name, rows.error().message);
    views = std::move(*rows);
  }
  return pool;
}

}  // namespace lockstep
