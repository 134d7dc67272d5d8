#include "cuda_backend/defects/planted_views.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "cuda_backend/views/overlaid_views.h"

namespace lockstep::cuda {

namespace {

bool is_row_cache(const KVCacheSpec& spec, AttentionBackend chosen) {
  const auto backend = backend_of(spec, chosen);
  return backend && dim_roles(*backend).kv < 0;
}

// Treats the rightmost dimension of size 2 as the pair: the heads, if there are two.
void guess_pair_from_right(LayerViews& views) {
  const Dims& shape = views.tensors.front().shape;
  for (auto dim = static_cast<std::int32_t>(shape.size()) - 2; dim >= 0; --dim) {
    if (shape[dim] != 2 || dim != views.head_dim) continue;
    std::swap(views.kv_dim, views.head_dim);
    return;
  }
}

// What both kinds of layout share.
template <class Deriver>
class Planted : public Deriver {
 public:
  Planted(const KVCacheConfig& plan, const ViewOptions& options, ViewDefects planted)
      : Deriver(plan, options), planted_(planted) {}

 protected:
  bool has(ViewDefect one) const { return planted_.has(one); }
  std::int64_t state_offset(std::int64_t offset_bytes, std::int64_t itemsize,
                            std::int64_t itemsize_before) const override {
    const bool wrong = has(ViewDefect::state_offset_wrong_itemsize) && itemsize_before != 0;
    return offset_bytes / (wrong ? itemsize_before : itemsize);
  }

 private:
  const ViewDefects planted_;
};

class PlantedDeriver final : public Planted<ViewDeriver> {
 public:
  using Planted::Planted;

 private:
  std::int64_t layers_allocated(const KVCacheGroupSpec& group) const override {
    return has(ViewDefect::pack_num_blocks) ? 1 : ViewDeriver::layers_allocated(group);
  }
  std::int64_t kernel_size(const KVCacheGroupSpec& group) const override {
    return has(ViewDefect::kernel_block_unsplit) ? group.spec.block_size
                                                 : ViewDeriver::kernel_size(group);
  }
  Result<LayerViews> layer_views(std::size_t g, std::size_t layer) const override {
    const KVCacheGroupSpec& group = plan_.groups[g];
    const std::string& name = group.layer_names[layer];
    const bool states = is_state_kind(group.spec.kind);
    if (states && has(ViewDefect::state_spec_unhandled))
      return fail("{}: caches of kind mamba are not reshaped", name);
    if (states || !has(ViewDefect::layout_equal_page)) return ViewDeriver::layer_views(g, layer);
    const TensorPlace at = placement(group, layer);
    const auto [spec, size] = first_of_tensor(at.tensor);
    return token_views(*spec, size, group.layers_per_page, at, name);
  }
  // The first token cache in the tensor: its spec and what its kernels take.
  std::pair<const KVCacheSpec*, std::int64_t> first_of_tensor(std::size_t tensor) const {
    for (const std::string& name : plan_.tensors[tensor].shared_by)
      for (std::size_t g = 0; g < plan_.groups.size(); ++g) {
        const KVCacheGroupSpec& group = plan_.groups[g];
        const auto at = std::ranges::find(group.layer_names, name);
        if (at == group.layer_names.end() || is_state_kind(group.spec.kind)) continue;
        return {&group.layer_spec(static_cast<std::size_t>(at - group.layer_names.begin())),
                kernel_size_of_group_[g]};
      }
    LS_CHECK(false, "tensor {} holds no token cache", tensor);
    return {};
  }
  Result<LayerViews> token_views(const KVCacheSpec& spec, std::int64_t size, std::int64_t pack,
                                 TensorPlace at, const std::string& name) const override {
    auto views = ViewDeriver::token_views(spec, size, pack, at, name);
    if (views && has(ViewDefect::layout_two_heads)) guess_pair_from_right(*views);
    return views;
  }
  std::int64_t kernel_blocks(std::int64_t splits) const override {
    return ViewDeriver::kernel_blocks(has(ViewDefect::kernel_block_num_blocks) ? 1 : splits);
  }
  Order cache_order(AttentionBackend backend, bool packed) const override {
    const bool other = packed && has(ViewDefect::pack_stride);
    return ViewDeriver::cache_order(other ? AttentionBackend::triton_attn : backend, packed);
  }
  std::int64_t place_in_pack(TensorPlace at) const override {
    return has(ViewDefect::pack_offset) ? 0 : ViewDeriver::place_in_pack(at);
  }
  std::int64_t state_stride_bytes(const KVCacheSpec& spec) const override {
    return has(ViewDefect::state_stride_unpadded) ? dense_page_bytes(spec, options_.backend)
                                                  : ViewDeriver::state_stride_bytes(spec);
  }
  Result<void> update_layouts() override {
    if (has(ViewDefect::layout_two_blocks) || has(ViewDefect::ambiguous_refused) ||
        has(ViewDefect::layout_restride_hidden))
      return has_states_and_attention() ? update_by_shape() : Result<void>{};
    return has(ViewDefect::layout_not_updated) ? Result<void>{} : ViewDeriver::update_layouts();
  }
  // Model runner V2 of vLLM 0.22.1: a cache is pair-first if its first dimension is 2.
  Result<void> update_by_shape() {
    Result<void> result;
    for_each_token_cache([&](const KVCacheGroupSpec& group, LayerViews& views) {
      TensorView& view = views.tensors.front();
      const bool rows = is_row_cache(group.spec, options_.backend);
      const bool looked_at =
          rows ? has(ViewDefect::layout_restride_hidden)
               : has(ViewDefect::layout_two_blocks) || has(ViewDefect::ambiguous_refused);
      if (!looked_at) {
        if (views.block_dim == 1) lay_pair_in_page(view);
        return;
      }
      if (view.shape[0] != 2) return;
      if (view.shape[1] == 2 && has(ViewDefect::ambiguous_refused))
        result = fail("{}: the layout of a cache of shape [{}] is ambiguous",
                      group.layer_names.front(), fmt::join(view.shape, ", "));
      else
        lay_pair_in_page(view);
    });
    return result;
  }
};

constexpr ViewDefects kOfOverlaid{ViewDefect::order_layer_stride, ViewDefect::order_head_stride,
                                  ViewDefect::mapped_dense};
constexpr ViewDefects kOfBoth{ViewDefect::state_stride_unpadded,
                              ViewDefect::state_offset_wrong_itemsize, ViewDefect::offset_int32};

class PlantedOverlay final : public Planted<OverlaidDeriver> {
 public:
  using Planted::Planted;

 private:
  std::int64_t layer_stride(const KVCacheSpec& spec, const Pages& at) const override {
    const bool rows = !is_state_kind(spec.kind);
    return OverlaidDeriver::layer_stride(spec, at) -
           (rows && has(ViewDefect::order_layer_stride) ? at.row_stride : 0);
  }
  Result<Pages> pages(std::size_t group, std::size_t layer, std::int64_t splits) const override {
    LS_ASSIGN_OR_RETURN(Pages at, OverlaidDeriver::pages(group, layer, splits));
    const KVCacheSpec& spec = plan_.groups[group].layer_spec(layer);
    const bool is_state = is_state_kind(spec.kind);
    if (is_state && has(ViewDefect::state_stride_unpadded))
      at.block_stride -= page_bytes(spec, options_.backend) - at.content;
    if (!is_state && has(ViewDefect::order_head_stride)) at.head_stride -= at.content / 2;
    return at;
  }
  std::int64_t kernel_blocks_apart(const Pages& at, std::int64_t bytes) const override {
    return has(ViewDefect::mapped_dense) ? at.rows * at.row_stride / bytes
                                         : OverlaidDeriver::kernel_blocks_apart(at, bytes);
  }
};

}  // namespace

Result<PoolViews> planted_views(const KVCacheConfig& plan, const ViewOptions& options,
                                ViewDefects defects) {
  const bool overlaid = is_overlaid(options.layout);
  for (const ViewDefect one : kAllDefects<ViewDefect>)
    if (defects.has(one) && !kOfBoth.has(one) && kOfOverlaid.has(one) != overlaid)
      return fail("mutant: {} is not in views of layout {}", name_of(one), name_of(options.layout));
  if (overlaid) return PlantedOverlay(plan, options, defects).derive();
  return PlantedDeriver(plan, options, defects).derive();
}

std::int64_t planted_byte_offset(const TensorView& view, std::span<const std::int64_t> index,
                                 ViewDefects defects) {
  if (!defects.has(ViewDefect::offset_int32)) return view_byte_offset(view, index);
  auto offset = static_cast<std::uint32_t>(view.storage_offset);
  for (std::size_t i = 0; i < index.size(); ++i)
    offset += static_cast<std::uint32_t>(index[i]) * static_cast<std::uint32_t>(view.stride[i]);
  return std::int64_t{static_cast<std::int32_t>(offset)} * itemsize_bytes(view.dtype);
}

}  // namespace lockstep::cuda
