#include "cuda_backend/views/views.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/check.h"
#include "cuda_backend/views/views_shape.h"

namespace lockstep::cuda {
namespace {

std::int64_t stored_tokens(const KVCacheSpec& spec) {
  return spec.block_size / spec.compress_ratio;
}

// One block of one layer: what its shape holds, and what it takes of the buffer.
std::int64_t dense_page_bytes(const KVCacheSpec& spec, AttentionBackend chosen) {
  if (spec.kind == CacheKind::mamba) {
    std::int64_t bytes = 0;
    for (const StateTensorSpec& state : spec.states)
      bytes += numel(state.dims) * itemsize_bytes(state.dtype);
    return bytes;
  }
  const Dims one_block = cache_shape(*backend_of(spec, chosen), spec, 1, stored_tokens(spec));
  return numel(one_block) * itemsize_bytes(spec.dtype);
}
bool is_row_cache(const KVCacheSpec& spec, AttentionBackend chosen) {
  const auto backend = backend_of(spec, chosen);
  return backend && dim_roles(*backend).kv < 0;
}

// Where a layer's cache lies: its tensor, and its place among the layers of a pack.
struct Placement {
  std::size_t tensor = 0;
  std::int64_t place = 0;
};

class Deriver {
 public:
  Deriver(const KVCacheConfig& plan, const ViewOptions& options) : plan_(plan), options_(options) {
    bool fp32_states = false;
    bool attention = false;
    for (const KVCacheGroupSpec& group : plan.groups) {
      const bool states = group.spec.kind == CacheKind::mamba;
      // Which blocks kernels take follows from the model, also in a pipeline stage without its
      // states; how pages are shared, from the layers that are here.
      attention |= !states;
      for (const StateTensorSpec& state : group.spec.states)
        fp32_states |= state.dtype == DType::fp32;
      if (group.layer_names.empty()) continue;
      has_states_ |= states;
      has_attention_ |= !states;
    }
    hybrid_fp32_ = fp32_states && attention;
  }

  Result<PoolViews> derive() {
    allocate();
    if (auto sizes = choose_kernel_sizes(); !sizes) return tl::unexpected(sizes.error());
    for (std::size_t g = 0; g < plan_.groups.size(); ++g) {
      pool_.groups.emplace_back();
      if (plan_.groups[g].spec.kind == CacheKind::encoder_only) continue;
      for (std::size_t i = 0; i < plan_.groups[g].layer_names.size(); ++i) {
        auto views = layer_views(g, i);
        if (!views) return tl::unexpected(views.error());
        pool_.groups.back().push_back(std::move(*views));
      }
    }
    if (auto updated = update_layouts(); !updated) return tl::unexpected(updated.error());
    return std::move(pool_);
  }

 private:
  bool defect(ViewDefect one) const { return has(options_.defect, one); }

  Placement placement(const KVCacheGroupSpec& group, std::size_t layer) const {
    Placement placement;
    const auto holds = [&](const KVCacheTensor& tensor) {
      return std::ranges::find(tensor.shared_by, group.layer_names[layer]) !=
             tensor.shared_by.end();
    };
    const auto tensor = std::ranges::find_if(plan_.tensors, holds);
    LS_CHECK(tensor != plan_.tensors.end(), "{} has no tensor", group.layer_names[layer]);
    placement.tensor = static_cast<std::size_t>(tensor - plan_.tensors.begin());
    for (std::size_t i = 0; i < layer && group.layers_per_page > 1; ++i)
      placement.place += std::ranges::count(tensor->shared_by, group.layer_names[i]);
    return placement;
  }

  // The engine's buffers: a page of every block, for each tensor.
  void allocate() {
    pool_.tensor_size_bytes.resize(plan_.tensors.size());
    for (const KVCacheGroupSpec& group : plan_.groups)
      for (std::size_t i = 0; i < group.layer_names.size(); ++i) {
        if (group.spec.kind == CacheKind::encoder_only) continue;
        const std::int64_t layers = defect(ViewDefect::pack_num_blocks) ? 1 : group.layers_per_page;
        pool_.tensor_size_bytes[placement(group, i).tensor] =
            plan_.num_blocks * layers * page_bytes(group.layer_spec(i), options_.backend);
      }
  }

  // Kernels of compressed rows and of MLA windows take the manager's blocks as they are.
  static bool takes_whole_blocks(const KVCacheSpec& spec) {
    return spec.compress_ratio > 1 || spec.mla_rows;
  }

  Result<void> choose_kernel_sizes() {
    for (std::size_t g = 0; g < plan_.groups.size(); ++g) {
      const KVCacheGroupSpec& group = plan_.groups[g];
      if (group.spec.kind == CacheKind::encoder_only) {
        kernel_size_of_group_.push_back(0);
        continue;
      }
      const std::int64_t size = kernel_size(group);
      if (size == 0)
        return fail(fmt::format("group {}: no kernel takes a block of {} tokens, nor a part of it",
                                g, group.spec.block_size));
      kernel_size_of_group_.push_back(size);
      pool_.kernel_block_sizes.push_back(size);
    }
    return {};
  }

  // The block itself where all kernels of the group take it, else the largest listed size that
  // divides it and that all take; 0: none.
  std::int64_t kernel_size(const KVCacheGroupSpec& group) const {
    const std::int64_t block_size = group.spec.block_size;
    if (group.spec.kind == CacheKind::mamba || options_.backend == AttentionBackend::any_size ||
        defect(ViewDefect::kernel_block_unsplit))
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

  Result<LayerViews> layer_views(std::size_t g, std::size_t layer) const {
    const KVCacheGroupSpec& group = plan_.groups[g];
    const Placement at = placement(group, layer);
    if (group.spec.kind == CacheKind::mamba) {
      if (defect(ViewDefect::state_spec_unhandled))
        return fail(
            fmt::format("{}: caches of kind mamba are not reshaped", group.layer_names[layer]));
      return state_views(group.layer_spec(layer), group.layer_names[layer]);
    }
    const KVCacheSpec* spec = &group.layer_spec(layer);
    std::int64_t size = kernel_size_of_group_[g];
    if (defect(ViewDefect::layout_equal_page)) take_first_of_tensor(at.tensor, spec, size);
    return token_views(*spec, size, group.layers_per_page, at, group.layer_names[layer]);
  }

  // The spec of the first token cache in the tensor, in the place of the layer's own.
  void take_first_of_tensor(std::size_t tensor, const KVCacheSpec*& spec,
                            std::int64_t& size) const {
    for (const std::string& name : plan_.tensors[tensor].shared_by)
      for (std::size_t g = 0; g < plan_.groups.size(); ++g) {
        const KVCacheGroupSpec& group = plan_.groups[g];
        const auto at = std::ranges::find(group.layer_names, name);
        if (at == group.layer_names.end() || group.spec.kind == CacheKind::mamba) continue;
        spec = &group.layer_spec(static_cast<std::size_t>(at - group.layer_names.begin()));
        size = kernel_size_of_group_[g];
        return;
      }
  }

  Result<LayerViews> token_views(const KVCacheSpec& spec, std::int64_t kernel_size,
                                 std::int64_t pack, Placement at, const std::string& name) const {
    const AttentionBackend backend = *backend_of(spec, options_.backend);
    const DimRoles roles = dim_roles(backend);
    if (roles.kv >= 0 && spec.head_size_v != 0 && spec.head_size_v != spec.head_size)
      return fail(fmt::format("{}: rows of {} and {} elements have no common shape", name,
                              spec.head_size, spec.head_size_v));
    const std::int64_t page = page_bytes(spec, options_.backend);
    if (page % itemsize_bytes(spec.dtype) != 0)
      return fail(fmt::format("{}: a page of {} bytes cannot be viewed as {}", name, page,
                              name_of(spec.dtype)));
    const std::int64_t num_blocks = plan_.num_blocks;
    const std::int64_t splits = spec.block_size / kernel_size;
    const std::int64_t kernel_blocks =
        defect(ViewDefect::kernel_block_num_blocks) ? num_blocks : num_blocks * splits;
    const std::int64_t tokens = stored_tokens(spec) / splits;

    LayerViews views;
    views.kernel_block_size = tokens;
    views.blocks_per_kv_block = splits;
    TensorView& view = views.tensors.emplace_back();
    view.dtype = spec.dtype;
    view.shape = cache_shape(backend, spec, kernel_blocks, tokens);
    if (pack > 1) view.shape.insert(view.shape.begin(), pack);
    Order order = stride_order(backend, options_.layout, pack > 1);
    if (pack > 1 && defect(ViewDefect::pack_stride))
      order = stride_order(AttentionBackend::triton_attn, options_.layout, true);
    view.stride = ordered_strides(view.shape, order);
    if (pack > 1) slice_layer(defect(ViewDefect::pack_offset) ? 0 : at.place, view);
    views.block_dim = roles.block;
    views.kv_dim = roles.kv;
    views.token_dim = roles.token;
    views.head_dim = roles.head;
    if (page != dense_page_bytes(spec, options_.backend)) {
      if (splits > 1)
        return fail(
            fmt::format("{}: a padded page of {} bytes cannot be cut into {} kernel blocks "
                        "by one stride",
                        name, page, splits));
      if (roles.kv == 0) lay_pair_in_page(view);
      view.stride[static_cast<std::size_t>(roles.block)] = page / itemsize_bytes(spec.dtype);
    }
    if (defect(ViewDefect::layout_two_heads)) guess_pair_from_right(views);
    return views;
  }

  // Layer `place` of a view whose first dimension counts layers.
  static void slice_layer(std::int64_t place, TensorView& view) {
    view.storage_offset += place * view.stride.front();
    view.shape.erase(view.shape.begin());
    view.stride.erase(view.stride.begin());
  }

  // The K and the V of a block side by side: [2, num_blocks, ...] with strides (h, 2h, ...).
  static void lay_pair_in_page(TensorView& view) {
    const std::int64_t half = numel(std::span(view.shape).subspan(2));
    view.stride[0] = half;
    view.stride[1] = 2 * half;
  }

  // The pair taken for the rightmost dimension of size 2: the heads, where there are two.
  static void guess_pair_from_right(LayerViews& views) {
    const Dims& shape = views.tensors.front().shape;
    for (auto dim = static_cast<std::int32_t>(shape.size()) - 2; dim >= 0; --dim) {
      if (shape[static_cast<std::size_t>(dim)] != 2 || dim != views.head_dim) continue;
      std::swap(views.kv_dim, views.head_dim);
      return;
    }
  }

  Result<LayerViews> state_views(const KVCacheSpec& spec, const std::string& name) const {
    LayerViews views;
    const std::int64_t page = defect(ViewDefect::state_stride_unpadded)
                                  ? dense_page_bytes(spec, options_.backend)
                                  : page_bytes(spec, options_.backend);
    std::int64_t offset_bytes = 0;
    std::int64_t itemsize_before = 0;
    for (const StateTensorSpec& state : spec.states) {
      const std::int64_t itemsize = itemsize_bytes(state.dtype);
      if (offset_bytes % itemsize != 0 || page_bytes(spec, options_.backend) % itemsize != 0)
        return fail(
            fmt::format("{}: a state at byte {} of a page of {} bytes cannot be viewed as {}", name,
                        offset_bytes, page, name_of(state.dtype)));
      TensorView& view = views.tensors.emplace_back();
      view.dtype = state.dtype;
      view.shape = {plan_.num_blocks};
      view.shape.insert(view.shape.end(), state.dims.begin(), state.dims.end());
      view.stride = dense_strides(view.shape);
      view.stride.front() = page / itemsize;
      const bool wrong = defect(ViewDefect::state_offset_wrong_itemsize) && itemsize_before != 0;
      view.storage_offset = offset_bytes / (wrong ? itemsize_before : itemsize);
      offset_bytes += numel(state.dims) * itemsize;
      itemsize_before = itemsize;
    }
    return views;
  }

  // After all views are made: those that keep the pair in front are re-strided where pages are
  // shared.
  Result<void> update_layouts() {
    const bool by_shape = defect(ViewDefect::layout_two_blocks) ||
                          defect(ViewDefect::ambiguous_refused) ||
                          defect(ViewDefect::layout_restride_hidden);
    if (by_shape) return has_states_ && has_attention_ ? update_by_shape() : Result<void>{};
    if (defect(ViewDefect::layout_not_updated) || !pages_are_shared()) return {};
    for_each_token_cache([](const KVCacheGroupSpec& group, LayerViews& views) {
      if (keeps_pair_first(views) && group.layers_per_page == 1)
        lay_pair_in_page(views.tensors.front());
    });
    return {};
  }

  // All K before all V. A padded page was laid out as one when its view was made, and keeps its
  // stride.
  static bool keeps_pair_first(const LayerViews& views) {
    if (views.kv_dim != 0 || views.block_dim != 1) return false;
    const Dims& stride = views.tensors.front().stride;
    return stride[0] >= stride[1];
  }

  bool pages_are_shared() const {
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

  // The second runner of vLLM 0.22.1: a cache is pair-first if its first dimension is 2.
  Result<void> update_by_shape() {
    Result<void> result;
    for_each_token_cache([&](const KVCacheGroupSpec& group, LayerViews& views) {
      TensorView& view = views.tensors.front();
      const bool rows = is_row_cache(group.spec, options_.backend);
      const bool looked_at =
          rows ? defect(ViewDefect::layout_restride_hidden)
               : defect(ViewDefect::layout_two_blocks) || defect(ViewDefect::ambiguous_refused);
      if (!looked_at) {
        if (views.block_dim == 1) lay_pair_in_page(view);
        return;
      }
      if (view.shape[0] != 2) return;
      if (view.shape[1] == 2 && defect(ViewDefect::ambiguous_refused))
        result = fail(fmt::format("{}: the order of a cache of shape [{}] cannot be told",
                                  group.layer_names.front(), fmt::join(view.shape, ", ")));
      else
        lay_pair_in_page(view);
    });
    return result;
  }

  template <class Function>
  void for_each_token_cache(Function&& function) {
    for (std::size_t g = 0; g < pool_.groups.size(); ++g)
      for (LayerViews& views : pool_.groups[g])
        if (views.kernel_block_size > 0) function(plan_.groups[g], views);
  }

  const KVCacheConfig& plan_;
  const ViewOptions& options_;
  bool has_states_ = false;
  bool has_attention_ = false;
  bool hybrid_fp32_ = false;
  std::vector<std::int64_t> kernel_size_of_group_;
  PoolViews pool_;
};

}  // namespace

std::int64_t page_bytes(const KVCacheSpec& spec, AttentionBackend chosen) {
  return spec.page_size_padded.value_or(dense_page_bytes(spec, chosen));
}

Result<PoolViews> derive_views(const KVCacheConfig& plan, const ViewOptions& options) {
  return Deriver(plan, options).derive();
}

std::int64_t view_byte_offset(const TensorView& view, std::span<const std::int64_t> index,
                              ViewDefect defect) {
  LS_CHECK(index.size() == view.shape.size(), "{} indices, {} dimensions", index.size(),
           view.shape.size());
  if (has(defect, ViewDefect::offset_int32)) {
    auto offset = static_cast<std::uint32_t>(view.storage_offset);
    for (std::size_t i = 0; i < index.size(); ++i)
      offset += static_cast<std::uint32_t>(index[i]) * static_cast<std::uint32_t>(view.stride[i]);
    return std::int64_t{static_cast<std::int32_t>(offset)} * itemsize_bytes(view.dtype);
  }
  std::int64_t offset = view.storage_offset;
  for (std::size_t i = 0; i < index.size(); ++i) offset += index[i] * view.stride[i];
  return offset * itemsize_bytes(view.dtype);
}

}  // namespace lockstep::cuda
