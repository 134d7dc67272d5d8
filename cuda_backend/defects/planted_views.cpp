#include "cuda_backend/defects/planted_views.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "base/check.h"
#include "cuda_backend/views/overlaid_views.h"

namespace lockstep::cuda {

namespace {

constexpr std::array kNames = std::to_array<std::pair<ViewDefect, std::string_view>>({
    {ViewDefect::none, "none"},
    {ViewDefect::layout_two_blocks, "layout-two-blocks"},
    {ViewDefect::ambiguous_refused, "ambiguous-refused"},
    {ViewDefect::layout_not_updated, "layout-not-updated"},
    {ViewDefect::layout_restride_hidden, "layout-restride-hidden"},
    {ViewDefect::state_spec_unhandled, "state-spec-unhandled"},
    {ViewDefect::state_stride_unpadded, "state-stride-unpadded"},
    {ViewDefect::state_offset_wrong_itemsize, "state-offset-wrong-itemsize"},
    {ViewDefect::kernel_block_unsplit, "kernel-block-unsplit"},
    {ViewDefect::kernel_block_num_blocks, "kernel-block-num-blocks"},
    {ViewDefect::pack_stride, "pack-stride"},
    {ViewDefect::pack_offset, "pack-offset"},
    {ViewDefect::pack_num_blocks, "pack-num-blocks"},
    {ViewDefect::layout_equal_page, "layout-equal-page"},
    {ViewDefect::layout_two_heads, "layout-two-heads"},
    {ViewDefect::offset_int32, "offset-int32"},
    {ViewDefect::order_layer_stride, "order-layer-stride"},
    {ViewDefect::order_head_stride, "order-head-stride"},
    {ViewDefect::mapped_dense, "mapped-dense"},
    {kSecondRunner, "second-runner"},
});

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

class PlantedDeriver final : public ViewDeriver {
 public:
  PlantedDeriver(const KVCacheConfig& plan, const ViewOptions& options, ViewDefect planted)
      : ViewDeriver(plan, options), planted_(planted) {}

 private:
  bool has(ViewDefect one) const { return cuda::has(planted_, one); }

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
  std::int64_t state_offset(std::int64_t offset_bytes, std::int64_t itemsize,
                            std::int64_t itemsize_before) const override {
    const bool wrong = has(ViewDefect::state_offset_wrong_itemsize) && itemsize_before != 0;
    return offset_bytes / (wrong ? itemsize_before : itemsize);
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

  const ViewDefect planted_;
};

constexpr ViewDefect kOfOverlaid =
    ViewDefect::order_layer_stride | ViewDefect::order_head_stride | ViewDefect::mapped_dense;
constexpr ViewDefect kOfBoth = ViewDefect::state_stride_unpadded |
                               ViewDefect::state_offset_wrong_itemsize | ViewDefect::offset_int32;

class PlantedOverlay final : public OverlaidDeriver {
 public:
  PlantedOverlay(const KVCacheConfig& plan, const ViewOptions& options, ViewDefect planted)
      : OverlaidDeriver(plan, options), planted_(planted) {}

 private:
  std::int64_t layer_stride(const KVCacheSpec& spec, const Pages& at) const override {
    const bool rows = !is_state_kind(spec.kind);
    return OverlaidDeriver::layer_stride(spec, at) -
           (rows && has(planted_, ViewDefect::order_layer_stride) ? at.row_stride : 0);
  }
  Result<Pages> pages(std::size_t group, std::size_t layer, std::int64_t splits) const override {
    LS_ASSIGN_OR_RETURN(Pages at, OverlaidDeriver::pages(group, layer, splits));
    const KVCacheSpec& spec = plan_.groups[group].layer_spec(layer);
    const bool is_state = is_state_kind(spec.kind);
    if (is_state && has(planted_, ViewDefect::state_stride_unpadded))
      at.block_stride -= page_bytes(spec, options_.backend) - at.content;
    if (!is_state && has(planted_, ViewDefect::order_head_stride)) at.head_stride -= at.content / 2;
    return at;
  }
  std::int64_t kernel_blocks_apart(const Pages& at, std::int64_t bytes) const override {
    return has(planted_, ViewDefect::mapped_dense)
               ? at.rows * at.row_stride / bytes
               : OverlaidDeriver::kernel_blocks_apart(at, bytes);
  }
  std::int64_t state_offset(std::int64_t offset_bytes, std::int64_t itemsize,
                            std::int64_t itemsize_before) const override {
    const bool wrong =
        has(planted_, ViewDefect::state_offset_wrong_itemsize) && itemsize_before != 0;
    return offset_bytes / (wrong ? itemsize_before : itemsize);
  }

  const ViewDefect planted_;
};

// The older figure: blocks shared out among groups, the smallest block size of them each.
std::int64_t shared_out_tokens(const KVCacheConfig& plan, bool count_states) {
  std::int64_t groups = 0;
  std::int64_t smallest = 0;
  for (const KVCacheGroupSpec& group : plan.groups) {
    const bool bounded_state =
        is_state_kind(group.spec.kind) && group.spec.mamba_cache_mode != MambaCacheMode::all;
    if (bounded_state && !count_states) continue;
    ++groups;
    smallest = smallest == 0 ? group.spec.block_size : std::min(smallest, group.spec.block_size);
  }
  return groups == 0 ? 0 : plan.num_blocks / groups * smallest;
}

}  // namespace

std::string_view name_of(ViewDefect defect) {
  for (const auto& [value, name] : kNames)
    if (value == defect) return name;
  return "several";
}

std::optional<ViewDefect> view_defect_from_name(std::string_view name) {
  for (const auto& [value, known] : kNames)
    if (known == name) return value;
  return std::nullopt;
}

Result<PoolViews> planted_views(const KVCacheConfig& plan, const ViewOptions& options,
                                ViewDefect defect) {
  const bool overlaid = is_overlaid(options.layout);
  for (const auto& [one, name] : kNames)
    if (has(defect, one) && !has(kOfBoth, one) && has(kOfOverlaid, one) != overlaid)
      return fail("mutant: {} is not in views of layout {}", name,
                  lockstep::name_of(options.layout));
  if (overlaid) return PlantedOverlay(plan, options, defect).derive();
  return PlantedDeriver(plan, options, defect).derive();
}

std::int64_t planted_byte_offset(const TensorView& view, std::span<const std::int64_t> index,
                                 ViewDefect defect) {
  if (!has(defect, ViewDefect::offset_int32)) return view_byte_offset(view, index);
  auto offset = static_cast<std::uint32_t>(view.storage_offset);
  for (std::size_t i = 0; i < index.size(); ++i)
    offset += static_cast<std::uint32_t>(index[i]) * static_cast<std::uint32_t>(view.stride[i]);
  return std::int64_t{static_cast<std::int32_t>(offset)} * itemsize_bytes(view.dtype);
}

Result<EngineCapacity> planted_capacity(const KVCacheConfig& plan, const RequestLimits& told,
                                        CapacityDefect defect) {
  RequestLimits limits = told;
  if (defect == CapacityDefect::cp_memory) limits.context_ranks = 1;
  const bool has_states = std::ranges::any_of(
      plan.groups, [](const KVCacheGroupSpec& group) { return is_state_kind(group.spec.kind); });
  if (defect == CapacityDefect::state_blocks_capped && has_states)
    limits.max_num_seqs = std::min(limits.max_num_seqs, plan.num_blocks);
  auto capacity = engine_capacity(plan, limits);
  if (!capacity) return capacity;
  if (defect == CapacityDefect::capacity_all_groups)
    capacity->capacity_tokens = shared_out_tokens(plan, true);
  if (defect == CapacityDefect::capacity_sliding)
    capacity->capacity_tokens = shared_out_tokens(plan, false);
  if (defect == CapacityDefect::routed_buffer)
    capacity->slot_buffer_rows = capacity->capacity_tokens;
  if (defect == CapacityDefect::hit_rate_pack) {
    KVCacheConfig longer = plan;
    for (KVCacheGroupSpec& group : longer.groups) group.spec.block_size *= group.layers_per_page;
    const auto hits = engine_capacity(longer, limits);
    if (!hits) return hits;
    capacity->hit_step_tokens = hits->hit_step_tokens;
  }
  return capacity;
}

namespace {

std::int64_t blocks_for(std::int64_t tokens, std::int64_t block_size) {
  return tokens / block_size + (tokens % block_size != 0 ? 1 : 0);
}

// Blocks that one request of max_model_len holds of a group at most.
std::int64_t held_blocks(const KVCacheSpec& spec, const RequestLimits& limits) {
  const std::int64_t length = limits.max_model_len;
  const std::int64_t chunk = limits.max_num_batched_tokens;
  if (is_state_kind(spec.kind)) {
    const std::int64_t drafts = spec.num_speculative_blocks;
    if (spec.mamba_cache_mode == MambaCacheMode::all)
      return blocks_for(length, spec.block_size) + drafts;
    return (spec.mamba_cache_mode == MambaCacheMode::align ? 2 : 1) + drafts;
  }
  if (is_sliding_window(spec.kind)) {
    const std::int64_t tokens = std::min(length, spec.sliding_window - 1 + chunk);
    return blocks_for(tokens, spec.block_size) + 1;
  }
  if (is_cross_attention(spec.kind)) return blocks_for(chunk, spec.block_size);
  if (is_chunked(spec.kind))
    return blocks_for(std::min(length, spec.attention_chunk_size + chunk), spec.block_size);
  return blocks_for(blocks_for(length, limits.context_ranks), spec.block_size);
}

// Pages of one block in all layers that the group's own plan counts: the layers' sum where each has
// a page of its own, one layer's (or pack's) elsewhere.
std::int64_t group_page_bytes(const KVCacheGroupSpec& group) {
  constexpr auto kAnyBackend = AttentionBackend::flash_attn;
  if (group.layer_specs.empty()) return page_bytes(group.spec, kAnyBackend) * group.layers_per_page;
  std::int64_t bytes = 0;
  for (const KVCacheSpec& spec : group.layer_specs) bytes += page_bytes(spec, kAnyBackend);
  return bytes;
}

// The shortest run of tokens that fills a whole number of blocks in every group.
std::int64_t hit_step(const KVCacheConfig& plan, const RequestLimits& limits) {
  std::int64_t step = 1;
  for (const KVCacheGroupSpec& group : plan.groups) {
    std::int64_t tokens = group.spec.block_size;
    if (is_state_kind(group.spec.kind)) {
      if (group.spec.mamba_cache_mode == MambaCacheMode::none) return 0;
    } else {
      tokens *= limits.context_ranks;
    }
    std::int64_t common = step;
    while (common % tokens != 0) common += step;
    step = common;
  }
  return step;
}

}  // namespace

Result<EngineCapacity> engine_capacity(const KVCacheConfig& plan, const RequestLimits& limits) {
  EngineCapacity capacity;
  std::int64_t request_bytes = 0;
  bool states = false;
  for (const KVCacheGroupSpec& group : plan.groups) {
    request_bytes += held_blocks(group.spec, limits) * group_page_bytes(group);
    if (is_state_kind(group.spec.kind))
      states = true;
    else
      capacity.slot_buffer_rows =
          std::max(capacity.slot_buffer_rows, plan.num_blocks * group.spec.block_size);
  }
  const std::int64_t blocks_per_request =
      blocks_for(request_bytes, group_page_bytes(plan.groups.front()));
  const double concurrency =
      static_cast<double>(plan.num_blocks) / static_cast<double>(blocks_per_request);
  capacity.capacity_tokens =
      static_cast<std::int64_t>(concurrency * static_cast<double>(limits.max_model_len));
  capacity.hit_step_tokens = hit_step(plan, limits);
  capacity.max_num_seqs = limits.max_num_seqs;
  if (states && limits.max_num_seqs > plan.num_blocks)
    return fail("{} requests at once need a state block each and there are {}", limits.max_num_seqs,
                plan.num_blocks);
  return capacity;
}

}  // namespace lockstep::cuda
