#include "reference/placement/cache_spec.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <tuple>

#include "base/number_text.h"
#include "reference/plan/grouping.h"
#include "reference/types/token_rows.h"

namespace lockstep {
namespace {

template <class Field>
bool all_equal(const LayerSpecs& layers, Field field) {
  return std::ranges::all_of(
      layers, [&](const NamedSpec& s) { return field(s.spec) == field(layers[0].spec); });
}

bool any_says(const LayerSpecs& layers, bool PlanFacts::*fact) {
  return std::ranges::any_of(layers, [&](const NamedSpec& s) { return s.spec.plan.*fact; });
}

// The fields of AttentionSpec, which two specs must share to be merged.
constexpr auto row_fields = [](auto& spec) {
  return std::tie(spec.block_size, spec.block_stride_alignment, spec.plan.stride_kernel_tokens,
                  spec.num_kv_heads, spec.head_size, spec.head_size_v, spec.dtype,
                  spec.kv_quant_mode, spec.dcp_sharded, spec.plan.max_tp_shards,
                  spec.page_size_padded, spec.plan.num_head_slots, spec.plan.state_content_bytes,
                  spec.tokens_per_state);
};

// The rows of `spec` and nothing else of its class.
KVCacheSpec rows_alone(const KVCacheSpec& spec) {
  KVCacheSpec merged;
  merged.kind = spec.kind;
  row_fields(merged) = row_fields(spec);
  return merged;
}

using MergedSpec = Result<std::optional<KVCacheSpec>>;

MergedSpec merge_mla(const LayerSpecs& layers) {
  const KVCacheSpec& first = layers[0].spec;
  const auto identity = [](auto& s) {
    return std::tie(s.cache_dtype_str, s.plan.topk_buffer_width, s.model_version, s.plan.is_indexer,
                    s.plan.is_index_group_leader);
  };
  const bool are_mla =
      std::ranges::all_of(layers, [](const NamedSpec& s) { return is_mla(s.spec.kind); });
  if (!are_mla || !all_equal(layers, row_fields) || !all_equal(layers, identity))
    return std::nullopt;
  KVCacheSpec merged = rows_alone(first);
  identity(merged) = identity(first);
  merged.plan.non_causal_multi_token_decode =
      any_says(layers, &PlanFacts::non_causal_multi_token_decode);
  merged.head_size_v = 0;
  return merged;
}

MergedSpec merge_mla_windows(const LayerSpecs& layers) {
  const KVCacheSpec& first = layers[0].spec;
  const auto identity = [](auto& s) {
    return std::tie(s.kind, s.cache_dtype_str, s.tokens_per_state, s.model_version,
                    s.sliding_window, s.extra_retained_tokens, s.bounded_replay,
                    s.block_stride_alignment, s.plan.stride_kernel_tokens, s.dcp_sharded,
                    s.plan.max_tp_shards);
  };
  if (!all_equal(layers, identity)) return std::nullopt;
  KVCacheSpec merged = rows_alone(first);
  identity(merged) = identity(first);
  merged.kv_quant_mode = KVQuantMode::none;
  merged.head_size_v = 0;
  return merged;
}

MergedSpec merge_full(const LayerSpecs& layers) {
  const KVCacheSpec& first = layers[0].spec;
  const CacheKind kind = first.kind;
  std::set<std::int64_t> windows, chunks;
  for (const NamedSpec& layer : layers) {
    const KVCacheSpec& spec = layer.spec;
    if (!is_full_attention(spec.kind)) return std::nullopt;
    if (kind == CacheKind::rswa && (spec.kind != kind || spec.rswa_window != first.rswa_window))
      return std::nullopt;
    if (spec.sliding_window != 0) windows.insert(spec.sliding_window);
    if (spec.attention_chunk_size != 0) chunks.insert(spec.attention_chunk_size);
  }
  for (const NamedSpec& layer : layers)
    if (is_mla(layer.spec.kind)) return std::nullopt;
  if (windows.size() > 1 || chunks.size() > 1)
    return fail(
        "layers of full attention with different windows: one group must have one window size; "
        "keep the hybrid manager");
  if (!all_equal(layers, row_fields) ||
      (kind == CacheKind::sink_full && !is_one_row(first.tokens_per_state)))
    return std::nullopt;
  if (!windows.empty() && !chunks.empty()) return std::nullopt;
  KVCacheSpec merged = rows_alone(first);
  if (!windows.empty()) merged.sliding_window = *windows.begin();
  if (!chunks.empty()) merged.attention_chunk_size = *chunks.begin();
  merged.rswa_window = first.rswa_window;
  merged.sink_len = first.sink_len;
  merged.plan.non_causal = any_says(layers, &PlanFacts::non_causal);
  return merged;
}

}  // namespace

std::int64_t num_heads(const KVCacheSpec& spec) {
  if (!is_attention(spec.kind)) return 1;
  return spec.plan.num_head_slots != 0 ? spec.plan.num_head_slots : spec.num_kv_heads;
}

std::int64_t rows_of(const KVCacheSpec& spec, std::int64_t block_size) {
  return is_attention(spec.kind) ? rows_in(spec.tokens_per_state, block_size) : 1;
}

std::int64_t content_bytes(const KVCacheSpec& spec) {
  if (!has_layer_views(spec.kind)) return spec.page_copy_bytes;
  if (spec.plan.state_content_bytes != 0) return spec.plan.state_content_bytes;
  if (!is_state_kind(spec.kind))
    return (spec.head_size + spec.head_size_v) * itemsize_bytes(spec.dtype);
  std::int64_t bytes = 0;
  for (const StateTensorSpec& state : spec.states) bytes += size_bytes(state);
  return bytes;
}

std::int64_t unpadded_page_bytes(const KVCacheSpec& spec) {
  return num_heads(spec) * rows_of(spec, spec.block_size) * content_bytes(spec);
}

std::int64_t page_bytes(const KVCacheSpec& spec) {
  return spec.page_size_padded.value_or(unpadded_page_bytes(spec));
}

bool is_cacheable_by_class(const KVCacheSpec& spec) {
  return is_prefix_cacheable(spec) || (is_cross_attention(spec) && !spec.bounded_replay);
}

std::int64_t stride_alignment_bytes(const KVCacheSpec& spec) {
  const std::int64_t tokens = spec.plan.stride_kernel_tokens;
  if (tokens == 0) return spec.block_stride_alignment;
  const std::int64_t kernel = std::gcd(tokens, spec.block_size);
  if (kernel == spec.block_size) return 1;
  return page_bytes(with_block_size(spec, kernel));
}

void apply_alignment(KVCacheSpec& spec) {
  if (spec.alignment == 0) return;
  const std::int64_t real = unpadded_page_bytes(spec);
  const std::int64_t padded = round_up(real, spec.alignment);
  if (padded != real) spec.page_size_padded = padded;
}

KVCacheSpec with_block_size(KVCacheSpec spec, std::int64_t block_size) {
  spec.block_size = block_size;
  apply_alignment(spec);
  return spec;
}

Result<std::optional<KVCacheSpec>> merge_specs(const LayerSpecs& layers) {
  const KVCacheSpec& first = layers[0].spec;
  if (is_mla(first.kind)) return merge_mla(layers);
  if (is_full_attention(first.kind)) return merge_full(layers);
  if (is_mla_window(first.kind)) return merge_mla_windows(layers);
  if (by_equal_spec(layers).size() > 1) return std::nullopt;
  return first;
}

namespace {

// In the engine's order.
constexpr std::array kOrders = {CacheLayout::LBHNC, CacheLayout::LBNHC, CacheLayout::LHBNC,
                                CacheLayout::BLHNC, CacheLayout::BLNHC, CacheLayout::BHLNC};
constexpr std::string_view kDimensions = "LBHNC";
// The preference where no backend declares one.
constexpr std::array kPreference = {CacheLayout::LBNHC, CacheLayout::LBHNC, CacheLayout::BLNHC,
                                    CacheLayout::BLHNC, CacheLayout::BHLNC, CacheLayout::LHBNC};

// Of one of the six; NHD and HND name LBNHC and LBHNC.
std::optional<CacheLayout> overlaid_layout_from_name(std::string_view name) {
  const auto layout = from_name<CacheLayout>(name);
  if (layout == CacheLayout::NHD) return CacheLayout::LBNHC;
  if (layout == CacheLayout::HND) return CacheLayout::LBHNC;
  return layout;
}

}  // namespace

Result<OrderStrides> order_strides(const KVCacheSpec& spec, std::int64_t num_blocks,
                                   std::int64_t num_layers, CacheLayout order,
                                   std::int64_t kernel_block_size, std::int64_t layer_stride,
                                   std::int64_t block_stride) {
  const std::int64_t tokens = kernel_block_size != 0 ? kernel_block_size : spec.block_size;
  const std::int64_t sizes[] = {num_layers, num_blocks * (spec.block_size / tokens),
                                num_heads(spec), rows_of(spec, tokens), content_bytes(spec)};
  const std::int64_t fixed[] = {layer_stride, block_stride, 0, 0, 0};
  const std::string_view nest = name_of(order);
  const std::int64_t padded = spec.page_size_padded.value_or(0);
  // The innermost of L and B: its stride is at least a padded page.
  const std::size_t grid_end = std::max(nest.find('L'), nest.find('B'));
  if (padded != 0) {
    if (tokens != spec.block_size)
      return fail(
          "a padded page cannot be split into kernel blocks; use blocks that every kernel takes "
          "whole");
    std::int64_t outside = 1;
    for (std::size_t i = 0; i <= grid_end; ++i) outside *= sizes[kDimensions.find(nest[i])];
    if (outside != num_layers * num_blocks)
      return fail(
          "layout {} cannot pad pages: their heads or rows are outside layers and blocks; use a "
          "block-compact layout",
          nest);
  }
  std::int64_t strides[5] = {};
  std::int64_t stride = 1;
  for (std::size_t i = nest.size(); i-- > 0;) {
    const std::size_t dimension = kDimensions.find(nest[i]);
    if (padded != 0 && i == grid_end) {
      stride = std::max(stride, padded);
      if (stride % padded != 0)
        return fail("a stride of {} bytes is not a multiple of padded pages of {} bytes", stride,
                    padded);
    }
    strides[dimension] = fixed[dimension] != 0 ? fixed[dimension] : stride;
    stride = strides[dimension] * sizes[dimension];
  }
  return OrderStrides{strides[0], strides[1], strides[2], strides[3], strides[4]};
}

Result<std::vector<CacheLayout>> supported_orders(
    const std::vector<std::vector<CacheLayout>>& declared) {
  std::vector<std::vector<CacheLayout>> lists;
  for (const auto& list : declared)
    if (!list.empty()) lists.push_back(list);
  if (lists.empty()) return std::vector<CacheLayout>(kPreference.begin(), kPreference.end());
  if (std::ranges::all_of(lists, [&](const auto& list) { return list == lists[0]; }))
    return lists[0];
  const auto is_everywhere = [&](CacheLayout order) {
    return std::ranges::all_of(
        lists, [&](const auto& list) { return std::ranges::find(list, order) != list.end(); });
  };
  const auto first_places = [&](CacheLayout order) {
    return std::ranges::count_if(lists, [&](const auto& list) { return list[0] == order; });
  };
  std::vector<CacheLayout> orders;
  std::ranges::copy_if(kOrders, std::back_inserter(orders), is_everywhere);
  std::ranges::stable_sort(orders, std::greater<>(), first_places);
  if (orders.empty()) return fail("no cache layout is in the lists of all backends");
  return orders;
}

Result<ChosenOrder> choose_order(const std::vector<CacheLayout>& supported, bool declared,
                                 const LayerSpecs& specs, const std::optional<std::string>& asked,
                                 std::optional<CacheLayout> connector) {
  std::set<std::tuple<std::int64_t, std::int64_t, std::int64_t>> shapes;
  std::set<std::int64_t> pages;
  std::set<bool> sharding;
  for (const NamedSpec& layer : specs) {
    const KVCacheSpec& spec = layer.spec;
    if (!has_layer_views(spec.kind)) continue;
    shapes.insert({num_heads(spec), rows_of(spec, spec.block_size), page_bytes(spec)});
    pages.insert(page_bytes(spec));
    if (is_attention(spec.kind) && uses_slot_mapping(spec.kind)) sharding.insert(spec.dcp_sharded);
  }
  std::vector<CacheLayout> orders = supported;
  if (shapes.size() > 1)
    std::erase_if(orders, [](CacheLayout order) { return !is_block_compact(order); });
  if (orders.empty())
    return fail(
        "pages that differ in heads, rows or bytes need a block-compact layout, and no backend of "
        "this model takes one");
  if (sharding.size() > 1 && pages.size() > 1)
    std::erase_if(orders, [](CacheLayout order) { return !is_block_outermost(order); });
  if (orders.empty())
    return fail(
        "caches that DCP shards and replicated ones of other page sizes need a layout with blocks "
        "outermost, and no backend of this model takes one");
  const auto is_candidate = [&](CacheLayout order) {
    return std::ranges::find(orders, order) != orders.end();
  };
  if (asked) {
    const auto order = overlaid_layout_from_name(*asked);
    if (!order || !is_candidate(*order))
      return fail("the layout {} does not suit this model and its backends; one of {} does", *asked,
                  joined(orders, &name_of<CacheLayout>));
    return ChosenOrder{*order, "option"};
  }
  if (connector && is_candidate(*connector)) return ChosenOrder{*connector, "connector"};
  return ChosenOrder{orders[0], declared ? "backends" : "default"};
}

namespace {

const std::vector<CacheBackend>& cache_backends() {
  using enum CacheLayout;
  using enum PageBinding;
  static const std::vector<CacheBackend> rows_of_backends = {
      {"flash_attn", {}, 16},
      {"triton_attn", {}, 16},
      {"flashinfer", {16, 32, 64}},
      {"flex_attention", {}, 16, {LBNHC}},
      {"cpu_attn", {}, 32, {LBHNC}},
      {"turboquant", {16, 32, 64, 128}, 0, {LBNHC}},
      {"cache_only", {}, 1},
      {"triton_mla", {}, 16, {}, rows, true},
      {"flashmla", {64}, 0, {}, rows, true},
      {"flashinfer_mla", {32, 64}, 0, {}, rows, true},
      {"flash_attn_mla", {}, 16, {}, rows},
      {"cutlass_mla", {128}, 0, {}, rows},
      {"tokenspeed_mla", {32, 64}, 0, {}, rows},
      {"flashmla_sparse", {}, 64, {}, rows, true},
      {"flash_attn_mla_sparse", {}, 64, {}, rows},
      {"flashinfer_mla_sparse", {}, 32, {}, rows, true},
      {"indexer_v32", {64}, 0, {}, rows, true},
      {"indexer_v4", {256}, 0, {BLHNC, BLNHC}, rows, true},
      {"indexer_kpool", {32, 64}, 0, {}, rows, true},  // KV entries, each of several tokens
      {"kpool_tail", {}, 1, {BLHNC}, rows, true},
      {"indexer_v41", {128}, 0, {BLHNC, BLNHC}, rows, true},
      {"indexer_v41_sparse", {128}, 0, {BLHNC, BLNHC}, rows, true},
      {"indexer_m3", {128}, 0, {}, rows},
      {"minimax_m3_sparse", {128}},
      {"sparse_swa", {}, 32, {}, rows},
      {"compressor_v4", {}, 1, {}, rows},
      {"compressor_v41", {}, 1, {}, rows, true},
      {"v4_flashmla", {256}, 0, {}, rows},
      {"v4_flashinfer", {256}, 0, {}, rows},
      {"v41_flashmla", {128}, 0, {}, rows},
      {"v41_flashinfer", {128}, 0, {}, rows},
      {"qsa_state", {}, 1, {BLNHC, BLHNC}, rows_then_head},
      {"flash_attn_diffkv", {}, 16},
      {"inkling_sconv", {}, 1},
      {"gdn", {}, 1, {}, states},
      {"mamba1", {}, 1, {}, states},
      {"mamba2", {}, 1, {}, states},
      {"linear", {}, 1, {}, states},
      {"short_conv", {}, 1, {}, states},
  };
  return rows_of_backends;
}

}  // namespace

const CacheBackend* find_cache_backend(std::string_view name) {
  const auto at = std::ranges::find(cache_backends(), name, &CacheBackend::name);
  return at == cache_backends().end() ? nullptr : &*at;
}

KernelSizes kernel_sizes(const CacheBackend& backend, DeviceFamily device,
                         const KVCacheSpec& spec) {
  const bool by_device = backend.name == "indexer_v41" || backend.name == "indexer_v41_sparse" ||
                         backend.name == "v41_flashmla";
  if (by_device && device == DeviceFamily::sm90) return {{64}, 0};
  if (backend.name == "indexer_kpool") {
    KernelSizes sizes{backend.listed, 0};
    for (std::int64_t& size : sizes.listed) size = tokens_in(spec.tokens_per_state, size);
    return sizes;
  }
  if (backend.name == "flashmla_sparse" && device == DeviceFamily::sm100 &&
      spec.kv_quant_mode != KVQuantMode::none)
    return {{64}, 0};
  // The Hopper kernel of heads of 512 in fp8 reads 64 tokens at a time (flash_attn.py,
  // _get_sm90_fa4_fp8_kv_block_size()).
  if (backend.name == "flash_attn" && device == DeviceFamily::sm90 && spec.head_size == 512 &&
      spec.kv_quant_mode == KVQuantMode::fp8_per_tensor)
    return {{64}, 0};
  return {backend.listed, backend.multiple_of};
}

std::vector<CacheLayout> declared_orders(const CacheBackend& backend, DeviceFamily device) {
  if (backend.name == "flashinfer" && device == DeviceFamily::sm100)
    return {CacheLayout::LBHNC, CacheLayout::BLHNC};
  return backend.orders;
}

bool is_state_backend(const CacheBackend& backend) {
  return backend.binding == PageBinding::states;
}

}  // namespace lockstep
