#include "cuda_backend/views/overlaid_views.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/check.h"

namespace lockstep::cuda {
namespace {

// One block of a layer as its backend shapes it.
struct BlockShape {
  std::int64_t heads = 1;  // slots: those of V may follow those of K
  std::int64_t rows = 1;
  std::int64_t content = 0;  // bytes of one row in one slot
  std::int64_t parts = 1;    // K and V
  std::int64_t row = 0;      // bytes of K alone
};

bool has_scales_by_block(const KVCacheSpec& spec) {
  return spec.kv_quant_mode == KVQuantMode::nvfp4;
}

BlockShape block_shape(const KVCacheSpec& spec, AttentionBackend chosen, std::int64_t splits) {
  if (is_state_kind(spec.kind))
    return {.content = dense_page_bytes(spec, chosen), .row = dense_page_bytes(spec, chosen)};
  const AttentionBackend backend = *backend_of(spec, chosen);
  const DimRoles roles = dim_roles(backend);
  const std::int64_t tokens = stored_rows(spec, spec.block_size) / splits;
  const Dims dims = cache_shape(backend, spec, 1, tokens);
  BlockShape shape;
  if (roles.head >= 0) shape.heads = dims[roles.head];
  if (roles.kv >= 0) shape.parts = 2;
  shape.rows = tokens;
  shape.row = dims.back() * itemsize_bytes(spec.dtype);
  shape.content = shape.row;
  if (shape.parts == 2) (has_scales_by_block(spec) ? shape.heads : shape.content) *= 2;
  return shape;
}

std::int64_t in_whole(std::int64_t bytes, std::int64_t unit) {
  return (bytes + unit - 1) / unit * unit;
}
// What a layer takes of its group's run of bytes: of a block, or, with layers outermost, of all.
std::int64_t laid_bytes(const KVCacheSpec& spec, AttentionBackend chosen, bool blocks_outermost) {
  const std::int64_t page = page_bytes(spec, chosen);
  return blocks_outermost ? page : in_whole(page, spec.block_stride_alignment);
}
std::int64_t span_of_group(const KVCacheGroupSpec& group, AttentionBackend chosen,
                           bool blocks_outermost) {
  std::int64_t bytes = 0;
  for (std::size_t i = 0; i < group.layer_names.size(); ++i)
    bytes += laid_bytes(group.layer_spec(i), chosen, blocks_outermost);
  return bytes;
}
// Bytes of all pages of a block, with blocks outermost.
std::int64_t bytes_of_block(const KVCacheConfig& plan, AttentionBackend chosen) {
  std::int64_t widest = 0, unit = 1;
  for (const KVCacheGroupSpec& group : plan.groups) {
    if (!is_on_device(group)) continue;
    widest = std::max(widest, span_of_group(group, chosen, true));
    for (std::size_t i = 0; i < group.layer_names.size(); ++i)
      unit = std::lcm(unit, group.layer_spec(i).block_stride_alignment);
  }
  return in_whole(widest, unit);
}
bool is_any_of(CacheLayout layout, std::initializer_list<CacheLayout> these) {
  return std::ranges::find(these, layout) != these.end();
}
bool has_blocks_outermost(CacheLayout layout) {
  return is_any_of(layout, {CacheLayout::BLNHC, CacheLayout::BLHNC, CacheLayout::BHLNC});
}

// Layers of a group in the order in which they lie: by spec, in the order of each spec's first.
std::vector<std::size_t> order_of_layers(const KVCacheGroupSpec& group) {
  std::vector<std::size_t> order;
  std::vector<bool> taken(group.layer_names.size(), false);
  for (std::size_t first = 0; first < taken.size(); ++first) {
    if (taken[first]) continue;
    for (std::size_t i = first; i < taken.size(); ++i) {
      if (!(group.layer_spec(i) == group.layer_spec(first))) continue;
      taken[i] = true;
      order.push_back(i);
    }
  }
  return order;
}

// The group that reaches furthest with layers outermost: all others lie within it.
const KVCacheGroupSpec& widest_group(const KVCacheConfig& plan, AttentionBackend chosen) {
  return *std::ranges::max_element(plan.groups, {}, [&](const KVCacheGroupSpec& group) {
    return span_of_group(group, chosen, false);
  });
}

}  // namespace

OverlaidDeriver::OverlaidDeriver(const KVCacheConfig& plan, const ViewOptions& options)
    : ViewDeriver(plan, options),
      blocks_outermost_(has_blocks_outermost(options.layout)),
      heads_inside_(is_any_of(options.layout, {CacheLayout::LBNHC, CacheLayout::BLNHC})) {
  LS_CHECK(is_overlaid(options.layout), "{} is no order of the cache", name_of(options.layout));
}

std::int64_t OverlaidDeriver::layer_stride(const KVCacheSpec& spec, const Pages& at) const {
  const std::int64_t page = laid_bytes(spec, options_.backend, blocks_outermost_);
  if (!blocks_outermost_) return page * plan_.num_blocks;
  return options_.layout == CacheLayout::BHLNC ? page / at.heads : page;
}

Result<OverlaidDeriver::Pages> OverlaidDeriver::pages(std::size_t g, std::size_t layer,
                                                      std::int64_t splits) const {
  const KVCacheGroupSpec& group = plan_.groups[g];
  const KVCacheSpec& spec = group.layer_spec(layer);
  const BlockShape shape = block_shape(spec, options_.backend, splits);
  const std::int64_t page = laid_bytes(spec, options_.backend, blocks_outermost_);
  const std::int64_t dense = splits * shape.heads * shape.rows * shape.content;
  Pages at{.heads = shape.heads,
           .rows = shape.rows,
           .content = shape.content,
           .first_byte = 0,
           .block_stride = 0,
           .head_stride = 0,
           .row_stride = 0,
           .is_padded = page != dense};
  const bool heads_apart = is_any_of(options_.layout, {CacheLayout::LHBNC, CacheLayout::BHLNC});
  if (at.is_padded && heads_apart && at.heads > 1)
    return fail("{}: a page of {} bytes cannot be padded to {} in order {}",
                group.layer_names[layer], dense, page, name_of(options_.layout));
  // The layer's place in its group, and the number of layers with the same spec.
  std::int64_t alike = 0, place = 0;
  for (const std::size_t i : order_of_layers(group)) {
    const bool is_like = group.layer_spec(i) == spec;
    if (i == layer) place = alike;
    if (is_like)
      ++alike;
    else if (alike == 0)
      at.first_byte += laid_bytes(group.layer_spec(i), options_.backend, blocks_outermost_) *
                       (blocks_outermost_ ? 1 : plan_.num_blocks);
  }
  const std::int64_t run = shape.rows * shape.content;  // the tokens of one head
  at.row_stride = heads_inside_ ? shape.heads * shape.content : shape.content;
  at.head_stride = heads_inside_ ? shape.content : run;
  at.first_byte += place * layer_stride(spec, at);
  at.block_stride = blocks_outermost_ ? bytes_of_block(plan_, options_.backend) : page;
  if (options_.layout == CacheLayout::LHBNC) {
    at.block_stride = page / shape.heads;
    at.head_stride = at.block_stride * plan_.num_blocks;
  }
  if (options_.layout == CacheLayout::BHLNC) at.head_stride = alike * run * splits;
  if (splits == 1) return at;
  if (at.block_stride != dense)
    return fail(
        "{}: a block of {} bytes every {} is not dense, and cannot be cut into {} kernel blocks; "
        "use an order with layers outermost, LBNHC",
        group.layer_names[layer], dense, at.block_stride, splits);
  at.block_stride /= splits;
  if (heads_apart) at.head_stride = run;
  return at;
}

Result<LayerViews> OverlaidDeriver::layer_views(std::size_t g, std::size_t layer) const {
  const KVCacheGroupSpec& group = plan_.groups[g];
  if (group.layers_per_page > 1)
    return fail("{}: {} layers in a page", group.layer_names[layer], group.layers_per_page);
  const KVCacheSpec& spec = group.layer_spec(layer);
  const bool is_state = is_state_kind(spec.kind);
  const std::string& name = group.layer_names[layer];
  const auto mapped = options_.mapped_kernel_blocks.find(name);
  const bool is_mapped = mapped != options_.mapped_kernel_blocks.end();
  const std::int64_t splits =
      is_state || is_mapped ? 1 : spec.block_size / kernel_size_of_group_[g];
  LS_ASSIGN_OR_RETURN(const Pages at, pages(g, layer, splits));
  if (is_state) return state_views(spec, at.first_byte, at.block_stride, name);
  LS_ASSIGN_OR_RETURN(auto views, row_views(spec, at, splits, name));
  if (!is_mapped) return views;
  return mapped_views(std::move(views), spec, at, mapped->second, name);
}

Result<LayerViews> OverlaidDeriver::mapped_views(LayerViews whole, const KVCacheSpec& spec,
                                                 const Pages& at, std::int64_t tokens,
                                                 const std::string& name) const {
  const std::int64_t rows = stored_rows(spec, tokens);
  const std::int64_t bytes = rows * at.row_stride;
  if (at.heads != 1 || rows == 0 || at.rows % rows != 0 || at.block_stride % bytes != 0)
    return fail(
        "{}: a block every {} bytes cannot be cut into kernel blocks of {} tokens, {} bytes each; "
        "use --block-size {}",
        name, at.block_stride, tokens, bytes, tokens);
  whole.kernel_block_size = rows;
  whole.blocks_per_kv_block = at.rows / rows;
  whole.kernel_block_stride = kernel_blocks_apart(at, bytes);
  TensorView& view = whole.tensors.front();
  view.shape[whole.token_dim] = rows;
  view.shape[whole.block_dim] =
      (plan_.num_blocks - 1) * whole.kernel_block_stride + whole.blocks_per_kv_block;
  view.stride[whole.block_dim] = bytes / itemsize_bytes(view.dtype);
  return whole;
}

Result<LayerViews> OverlaidDeriver::row_views(const KVCacheSpec& spec, const Pages& at,
                                              std::int64_t splits, const std::string& name) const {
  const std::int64_t item = itemsize_bytes(spec.dtype);
  for (const std::int64_t bytes :
       {at.first_byte, at.block_stride, at.head_stride, at.row_stride, at.content})
    if (bytes % item != 0)
      return fail("{}: {} bytes of the cache are no whole {} elements", name, bytes,
                  name_of(spec.dtype));
  const BlockShape shape = block_shape(spec, options_.backend, splits);
  if (shape.parts == 2 && spec.head_size_v != 0 && spec.head_size_v != spec.head_size)
    return fail("{}: rows of {} and {} elements have no common shape", name, spec.head_size,
                spec.head_size_v);
  const std::int64_t heads = has_scales_by_block(spec) ? at.heads / shape.parts : at.heads;
  const std::int64_t to_value = has_scales_by_block(spec) ? heads * at.head_stride : shape.row;
  LayerViews views{.kernel_block_size = at.rows, .blocks_per_kv_block = splits};
  TensorView& view = views.tensors.emplace_back();
  view.dtype = spec.dtype;
  view.storage_offset = at.first_byte / item;
  const auto add = [&](std::int32_t& role, std::int64_t size, std::int64_t stride) {
    role = static_cast<std::int32_t>(view.shape.size());
    view.shape.push_back(size);
    view.stride.push_back(stride / item);
  };
  std::int32_t row = 0;
  add(views.block_dim, plan_.num_blocks * splits, at.block_stride);
  if (shape.parts == 2) add(views.kv_dim, 2, to_value);
  add(views.head_dim, heads, at.head_stride);
  add(views.token_dim, at.rows, at.row_stride);
  add(row, shape.row / item, item);
  return views;
}

void OverlaidDeriver::allocate() {
  for (const std::int64_t page : overlaid_pages(plan_, options_))
    pool_.tensor_size_bytes.push_back(page * plan_.num_blocks);
}

std::vector<std::int64_t> overlaid_pages(const KVCacheConfig& plan, const ViewOptions& options) {
  if (has_blocks_outermost(options.layout)) return {bytes_of_block(plan, options.backend)};
  const KVCacheGroupSpec& group = widest_group(plan, options.backend);
  std::vector<std::int64_t> pages;
  for (const std::size_t i : order_of_layers(group)) {
    const KVCacheSpec& spec = group.layer_spec(i);
    const std::int64_t page = laid_bytes(spec, options.backend, false);
    const std::int64_t slots =
        options.layout == CacheLayout::LHBNC ? block_shape(spec, options.backend, 1).heads : 1;
    pages.insert(pages.end(), static_cast<std::size_t>(slots), page / slots);
  }
  return pages;
}

KVCacheConfig overlaid_plan(KVCacheConfig plan, const ViewOptions& options) {
  const std::vector<std::int64_t> pages = overlaid_pages(plan, options);
  plan.tensors.clear();
  for (const std::int64_t page : pages)
    plan.tensors.push_back({.size_bytes = page * plan.num_blocks, .shared_by = {}});
  return plan;
}

}  // namespace lockstep::cuda
