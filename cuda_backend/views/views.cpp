#include "cuda_backend/views/views.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "base/check.h"
#include "cuda_backend/views/overlaid_views.h"

namespace lockstep::cuda {

namespace {

bool is_mla_backend(AttentionBackend backend) {
  return backend == AttentionBackend::triton_mla || backend == AttentionBackend::flashmla;
}

// The last dimension of a K/V cache. The scale of per-token-head quantization follows the row (one
// float). int4 has two values per byte and a scale, fp4 two values per byte and a scale byte per
// sixteen.
std::int64_t pair_row(const KVCacheSpec& spec) {
  const std::int64_t head_size = spec.head_size;
  switch (spec.kv_quant_mode) {
    case KVQuantMode::nvfp4:
      return head_size / 2 + head_size / 16;
    case KVQuantMode::int4_per_token_head:
      return head_size / 2 + std::int64_t{sizeof(float)};
    case KVQuantMode::int8_per_token_head:
    case KVQuantMode::fp8_per_token_head:
      return head_size + std::int64_t{sizeof(float)} / itemsize_bytes(spec.dtype);
    default:
      return head_size;
  }
}

// The last dimension of an MLA cache. Layouts in bytes: fp8_ds_mla 656, nvfp4_ds_mla 352
// (DeepSeek-V3.2), 584 (V4; its window layers have it whatever the cache dtype is called).
std::int64_t mla_row(const KVCacheSpec& spec) {
  const bool v4 = spec.model_version == "deepseek_v4";
  if (is_sliding_window(spec.kind)) return v4 ? 584 : spec.head_size;
  if (spec.cache_dtype_str == "fp8_ds_mla") return v4 ? 584 : 656;
  if (spec.cache_dtype_str == "nvfp4_ds_mla") return 352;
  return spec.head_size;
}

// Kernels of compressed rows, of MLA windows and of rings take the manager's blocks as they are.
bool takes_whole_blocks(const KVCacheSpec& spec) {
  return shares_rows(spec.tokens_per_state) || is_mla_window(spec.kind) || is_ring(spec.kind);
}

// Layer `place` of a view that counts layers in its first dimension.
void slice_layer(std::int64_t place, TensorView& view) {
  view.storage_offset += place * view.stride.front();
  view.shape.erase(view.shape.begin());
  view.stride.erase(view.stride.begin());
}

// All K before all V. A padded page was laid out as one when its view was made, and keeps its
// stride.
bool keeps_pair_first(const LayerViews& views) {
  if (views.kv_dim != 0 || views.block_dim != 1) return false;
  const Dims& stride = views.tensors.front().stride;
  return stride[0] >= stride[1];
}

}  // namespace

std::optional<AttentionBackend> backend_of(const KVCacheSpec& spec, AttentionBackend chosen) {
  if (is_state_kind(spec.kind)) return std::nullopt;
  if (is_hidden_state(spec.kind)) return AttentionBackend::cache_only;
  if (keeps_pairs(spec))
    return is_mla_backend(chosen) || chosen == AttentionBackend::cache_only ||
                   chosen == AttentionBackend::any_size
               ? AttentionBackend::triton_attn
               : chosen;
  return is_mla_backend(chosen) ? chosen : AttentionBackend::triton_mla;
}

bool KernelSizes::takes(std::int64_t size) const {
  if (!listed.empty()) return std::ranges::find(listed, size) != listed.end();
  return size % base == 0;
}

KernelSizes kernel_sizes(AttentionBackend backend, bool hybrid_fp32) {
  switch (backend) {
    case AttentionBackend::flash_attn:
      if (hybrid_fp32) return {{64, 32, 16}, 16};
      return {{}, 16};
    case AttentionBackend::flashinfer:
      return {{64, 32, 16}, 16};
    case AttentionBackend::triton_attn:
    case AttentionBackend::triton_mla:
      return {{}, 16};
    case AttentionBackend::flashmla:
      return {{64}, 64};
    case AttentionBackend::cache_only:
    case AttentionBackend::any_size:
      break;
  }
  return {{}, 1};
}

Dims cache_shape(AttentionBackend backend, const KVCacheSpec& spec, std::int64_t num_blocks,
                 std::int64_t block_size) {
  switch (backend) {
    case AttentionBackend::flash_attn:
      return {2, num_blocks, block_size, spec.num_kv_heads, pair_row(spec)};
    case AttentionBackend::flashinfer:
    case AttentionBackend::triton_attn:
      return {num_blocks, 2, block_size, spec.num_kv_heads, pair_row(spec)};
    case AttentionBackend::triton_mla:
    case AttentionBackend::flashmla:
      return {num_blocks, block_size, mla_row(spec)};
    case AttentionBackend::any_size:
    case AttentionBackend::cache_only:
      break;
  }
  return {num_blocks, block_size, spec.num_kv_heads, spec.head_size};
}

Order stride_order(AttentionBackend backend, CacheLayout layout, bool layers_dimension) {
  const bool nhd = layout == CacheLayout::NHD;
  switch (backend) {
    case AttentionBackend::flash_attn:
      if (layers_dimension) return nhd ? Order{2, 0, 1, 3, 4, 5} : Order{2, 4, 0, 1, 3, 5};
      return nhd ? Order{0, 1, 2, 3, 4} : Order{0, 1, 3, 2, 4};
    case AttentionBackend::flashinfer:
    case AttentionBackend::triton_attn:
      if (layers_dimension) return nhd ? Order{1, 0, 2, 3, 4, 5} : Order{1, 2, 4, 0, 3, 5};
      return nhd ? Order{0, 1, 2, 3, 4} : Order{0, 1, 3, 2, 4};
    case AttentionBackend::triton_mla:
    case AttentionBackend::flashmla:
      return layers_dimension ? Order{1, 0, 2, 3} : Order{0, 1, 2};
    case AttentionBackend::cache_only:
    case AttentionBackend::any_size:
      break;
  }
  return layers_dimension ? Order{1, 0, 2, 3, 4} : Order{0, 1, 2, 3};
}

DimRoles dim_roles(AttentionBackend backend) {
  constexpr std::int64_t kBlocks = 1234567;
  constexpr std::int64_t kTokens = 7654321;
  constexpr std::int64_t kHeads = 3456789;
  KVCacheSpec telling;
  telling.num_kv_heads = kHeads;
  telling.head_size = 9876543;
  const Dims shape = cache_shape(backend, telling, kBlocks, kTokens);
  const auto find = [&](std::int64_t number) {
    const auto at = std::ranges::find(shape, number);
    return at == shape.end() ? -1 : static_cast<std::int32_t>(at - shape.begin());
  };
  return {find(kBlocks), find(2), find(kTokens), find(kHeads)};
}

std::int64_t numel(std::span<const std::int64_t> dims) {
  return std::accumulate(dims.begin(), dims.end(), std::int64_t{1}, std::multiplies<>());
}

Dims dense_strides(const Dims& shape) {
  Dims strides(shape.size(), 1);
  for (std::size_t i = shape.size(); i-- > 1;) strides[i - 1] = strides[i] * shape[i];
  return strides;
}

Dims ordered_strides(const Dims& shape, const Order& order) {
  Dims physical;
  for (std::int32_t dim : order) physical.push_back(shape[dim]);
  const Dims dense = dense_strides(physical);
  Dims strides(shape.size());
  for (std::size_t i = 0; i < order.size(); ++i) strides[order[i]] = dense[i];
  return strides;
}

std::int64_t dense_page_bytes(const KVCacheSpec& spec, AttentionBackend chosen) {
  if (is_state_kind(spec.kind)) {
    std::int64_t bytes = 0;
    for (const StateTensorSpec& state : spec.states)
      bytes += numel(state.dims) * itemsize_bytes(state.dtype);
    return bytes;
  }
  const Dims one_block =
      cache_shape(*backend_of(spec, chosen), spec, 1, stored_rows(spec, spec.block_size));
  return numel(one_block) * itemsize_bytes(spec.dtype);
}
ViewDeriver::ViewDeriver(const KVCacheConfig& plan, const ViewOptions& options)
    : plan_(plan), options_(options) {
  bool fp32_states = false;
  bool attention = false;
  for (const KVCacheGroupSpec& group : plan.groups) {
    const bool states = is_state_kind(group.spec.kind);
    // Which blocks kernels take follows from the model, also in a pipeline stage without its
    // states; how pages are shared, from the layers that are here.
    attention |= !states;
    for (const StateTensorSpec& state : group.spec.states)
      fp32_states |= state.dtype == DType::fp32;
    if (group.layer_names.empty()) continue;
    has_states_ |= states;
    has_attention_ |= !states;
  }
  // Kernels of releases with overlaid memory take such blocks whole.
  hybrid_fp32_ = fp32_states && attention && !is_overlaid(options.layout);
}

Result<PoolViews> ViewDeriver::derive() {
  allocate();
  LS_RETURN_IF_ERROR(choose_kernel_sizes());
  for (std::size_t g = 0; g < plan_.groups.size(); ++g) {
    pool_.groups.emplace_back();
    if (!is_on_device(plan_.groups[g])) continue;
    for (std::size_t i = 0; i < plan_.groups[g].layer_names.size(); ++i) {
      LS_ASSIGN_OR_RETURN(auto views, layer_views(g, i));
      pool_.groups.back().push_back(std::move(views));
    }
  }
  LS_RETURN_IF_ERROR(update_layouts());
  return std::move(pool_);
}

TensorPlace ViewDeriver::placement(const KVCacheGroupSpec& group, std::size_t layer) const {
  TensorPlace placement;
  const auto holds = [&](const KVCacheTensor& tensor) {
    return std::ranges::find(tensor.shared_by, group.layer_names[layer]) != tensor.shared_by.end();
  };
  const auto tensor = std::ranges::find_if(plan_.tensors, holds);
  LS_CHECK(tensor != plan_.tensors.end(), "{} has no tensor", group.layer_names[layer]);
  placement.tensor = static_cast<std::size_t>(tensor - plan_.tensors.begin());
  for (std::size_t i = 0; i < layer && group.layers_per_page > 1; ++i)
    placement.place += std::ranges::count(tensor->shared_by, group.layer_names[i]);
  return placement;
}

void ViewDeriver::allocate() {
  pool_.tensor_size_bytes.resize(plan_.tensors.size());
  for (const KVCacheGroupSpec& group : plan_.groups)
    for (std::size_t i = 0; i < group.layer_names.size(); ++i) {
      if (!is_on_device(group)) continue;
      pool_.tensor_size_bytes[placement(group, i).tensor] =
          plan_.num_blocks * layers_allocated(group) *
          page_bytes(group.layer_spec(i), options_.backend);
    }
}

Result<void> ViewDeriver::choose_kernel_sizes() {
  for (std::size_t g = 0; g < plan_.groups.size(); ++g) {
    const KVCacheGroupSpec& group = plan_.groups[g];
    if (!is_on_device(group)) {
      kernel_size_of_group_.push_back(0);
      continue;
    }
    const std::int64_t size = kernel_size(group);
    if (size == 0)
      return fail("group {}: no kernel takes a block of {} tokens, nor a part of it", g,
                  group.spec.block_size);
    kernel_size_of_group_.push_back(size);
    pool_.kernel_block_sizes.push_back(size);
  }
  return {};
}

std::int64_t ViewDeriver::kernel_size(const KVCacheGroupSpec& group) const {
  const std::int64_t block_size = group.spec.block_size;
  if (is_state_kind(group.spec.kind) || options_.backend == AttentionBackend::any_size)
    return block_size;
  std::vector<KernelSizes> kernels;
  std::vector<std::int64_t> listed;
  for (std::size_t i = 0; i < group.layer_names.size(); ++i) {
    const KVCacheSpec& spec = group.layer_spec(i);
    if (takes_whole_blocks(spec)) return block_size;
    kernels.push_back(kernel_sizes(*backend_of(spec, options_.backend), hybrid_fp32_));
    listed.insert(listed.end(), kernels.back().listed.begin(), kernels.back().listed.end());
  }
  const auto all_take = [&](std::int64_t size) {
    return std::ranges::all_of(kernels, [&](const KernelSizes& k) { return k.takes(size); });
  };
  if (all_take(block_size)) return block_size;
  std::ranges::sort(listed, std::greater<>());
  for (std::int64_t size : listed)
    if (block_size % size == 0 && all_take(size)) return size;
  return 0;
}

Result<LayerViews> ViewDeriver::layer_views(std::size_t g, std::size_t layer) const {
  const KVCacheGroupSpec& group = plan_.groups[g];
  const KVCacheSpec& spec = group.layer_spec(layer);
  const std::string& name = group.layer_names[layer];
  if (is_state_kind(group.spec.kind)) return state_views(spec, 0, state_stride_bytes(spec), name);
  return token_views(spec, kernel_size_of_group_[g], group.layers_per_page, placement(group, layer),
                     name);
}

Result<LayerViews> ViewDeriver::token_views(const KVCacheSpec& spec, std::int64_t kernel_size,
                                            std::int64_t pack, TensorPlace at,
                                            const std::string& name) const {
  const AttentionBackend backend = *backend_of(spec, options_.backend);
  const DimRoles roles = dim_roles(backend);
  if (roles.kv >= 0 && spec.head_size_v != 0 && spec.head_size_v != spec.head_size)
    return fail("{}: rows of {} and {} elements have no common shape", name, spec.head_size,
                spec.head_size_v);
  const std::int64_t page = page_bytes(spec, options_.backend);
  if (page % itemsize_bytes(spec.dtype) != 0)
    return fail("{}: a page of {} bytes cannot be viewed as {}", name, page, name_of(spec.dtype));
  const std::int64_t splits = spec.block_size / kernel_size;
  const std::int64_t tokens = stored_rows(spec, spec.block_size) / splits;

  LayerViews views;
  views.kernel_block_size = tokens;
  views.blocks_per_kv_block = splits;
  TensorView& view = views.tensors.emplace_back();
  view.dtype = spec.dtype;
  view.shape = cache_shape(backend, spec, kernel_blocks(splits), tokens);
  if (pack > 1) view.shape.insert(view.shape.begin(), pack);
  view.stride = ordered_strides(view.shape, cache_order(backend, pack > 1));
  if (pack > 1) slice_layer(place_in_pack(at), view);
  views.block_dim = roles.block;
  views.kv_dim = roles.kv;
  views.token_dim = roles.token;
  views.head_dim = roles.head;
  if (page != dense_page_bytes(spec, options_.backend)) {
    if (splits > 1)
      return fail("{}: a padded page of {} bytes cannot be cut into {} kernel blocks by one stride",
                  name, page, splits);
    if (roles.kv == 0) lay_pair_in_page(view);
    view.stride[roles.block] = page / itemsize_bytes(spec.dtype);
  }
  return views;
}

void ViewDeriver::lay_pair_in_page(TensorView& view) {
  const std::int64_t half = numel(std::span(view.shape).subspan(2));
  view.stride[0] = half;
  view.stride[1] = 2 * half;
}

Result<LayerViews> ViewDeriver::state_views(const KVCacheSpec& spec, std::int64_t first_byte,
                                            std::int64_t stride_bytes,
                                            const std::string& name) const {
  LayerViews views;
  std::int64_t offset = 0;  // in the page
  std::int64_t item_before = 0;
  for (const StateTensorSpec& state : spec.states) {
    const std::int64_t item = itemsize_bytes(state.dtype), byte = first_byte + offset;
    if (byte % item != 0 || stride_bytes % item != 0)
      return fail(
          "{}: a state at byte {}, every {} bytes, cannot be viewed as {}; --backend none needs no "
          "views",
          name, byte, stride_bytes, name_of(state.dtype));
    TensorView& view = views.tensors.emplace_back();
    view.dtype = state.dtype;
    view.shape = {plan_.num_blocks};
    view.shape.insert(view.shape.end(), state.dims.begin(), state.dims.end());
    view.stride = dense_strides(view.shape);
    view.stride.front() = stride_bytes / item;
    view.storage_offset = byte / item - offset / item + state_offset(offset, item, item_before);
    offset += numel(state.dims) * item;
    item_before = item;
  }
  return views;
}

Result<void> ViewDeriver::update_layouts() {
  if (!pages_are_shared()) return {};
  for_each_token_cache([](const KVCacheGroupSpec& group, LayerViews& views) {
    if (keeps_pair_first(views) && group.layers_per_page == 1)
      lay_pair_in_page(views.tensors.front());
  });
  return {};
}

bool ViewDeriver::pages_are_shared() const {
  if (options_.rule == LayoutRule::vllm_0_22_1) return has_states_ && has_attention_;
  std::vector<int> pair_first(plan_.tensors.size(), 0);
  std::vector<int> page_first(plan_.tensors.size(), 0);
  for (std::size_t g = 0; g < pool_.groups.size(); ++g)
    for (std::size_t i = 0; i < pool_.groups[g].size(); ++i) {
      const bool pair = keeps_pair_first(pool_.groups[g][i]);
      ++(pair ? pair_first : page_first)[placement(plan_.groups[g], i).tensor];
    }
  for (std::size_t t = 0; t < plan_.tensors.size(); ++t)
    if (pair_first[t] > 0 && page_first[t] > 0) return true;
  return false;
}

std::int64_t page_bytes(const KVCacheSpec& spec, AttentionBackend chosen) {
  return spec.page_size_padded.value_or(dense_page_bytes(spec, chosen));
}

Result<PoolViews> derive_views(const KVCacheConfig& plan, const ViewOptions& options) {
  if (is_overlaid(options.layout)) return OverlaidDeriver(plan, options).derive();
  return ViewDeriver(plan, options).derive();
}

std::int64_t view_byte_offset(const TensorView& view, std::span<const std::int64_t> index) {
  LS_CHECK(index.size() == view.shape.size(), "{} indices, {} dimensions", index.size(),
           view.shape.size());
  std::int64_t offset = view.storage_offset;
  for (std::size_t i = 0; i < index.size(); ++i) offset += index[i] * view.stride[i];
  return offset * itemsize_bytes(view.dtype);
}

}  // namespace lockstep::cuda
