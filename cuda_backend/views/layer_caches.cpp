#include "cuda_backend/views/layer_caches.h"

#include <fmt/format.h>

#include <algorithm>
#include <initializer_list>
#include <utility>

#include "base/check.h"

namespace lockstep::cuda {

namespace {

// Layers [first, ...) of the source, as many as the group has.
Result<void> bind_group(const KVCacheGroupSpec& source, std::size_t first,
                        KVCacheGroupSpec& group) {
  const KVCacheSpec region = group.spec;
  const bool is_hot = is_hot_pages(region.kind);
  group.role = is_hot ? kHotRole : kResidentRole;
  for (std::size_t i = 0; i < group.layer_names.size(); ++i) {
    if (first + i >= source.layer_names.size())
      return fail("{}: the source has {} layers", group.layer_names[i], source.layer_names.size());
    KVCacheSpec rows = source.layer_spec(first + i);
    rows.page_size_padded.reset();
    rows.blocks_per_request = region.blocks_per_request;
    if (const std::int64_t bytes = dense_page_bytes(rows, AttentionBackend::any_size);
        bytes != region.page_copy_bytes || rows.block_size != region.block_size)
      return fail("{}: pages of {} bytes for {} tokens, and its rows take {}", group.layer_names[i],
                  region.page_copy_bytes, region.block_size, bytes);
    if (i == 0) group.spec = rows;
    if (!(rows == group.spec))
      return fail("{}: rows unlike those of {}", group.layer_names[i], group.layer_names.front());
  }
  return {};
}

// The widest access, up to 16 bytes, that all of these offsets and sizes are multiples of.
std::int32_t widest_unit(std::initializer_list<std::int64_t> bytes) {
  std::int64_t all = 16;
  for (std::int64_t value : bytes) all |= value;
  return static_cast<std::int32_t>(all & -all);
}

struct Extent {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

class Builder {
 public:
  Builder(const BackendConfig& config, std::span<const LayerOfModel> places,
          std::span<std::byte* const> bases)
      : config_(config), places_(places), bases_(bases) {
    for (const KVCacheTensor& tensor : config.plan.tensors) {
      begins_.push_back(end_);
      if (is_overlaid(config.layout)) end_ += tensor.size_bytes;
    }
  }

  Result<LayerCaches> build(const PoolViews* given) {
    LS_ASSIGN_OR_RETURN(const auto own, derive_views(config_.plan, view_options(config_)));
    LS_RETURN_IF_ERROR(check_kernel_blocks(own));
    const PoolViews& views = given == nullptr ? own : *given;
    add_pages();
    for (std::size_t g = 0; g < views.groups.size(); ++g)
      LS_RETURN_IF_ERROR(add_group(g, views.groups[g], own.groups[g]));
    add_poison_regions(own);
    return std::move(caches_);
  }

 private:
  // One size a group; the views have none for groups that keep nothing (encoder-only).
  Result<void> check_kernel_blocks(const PoolViews& views) const {
    std::vector<std::int64_t> told;
    for (std::size_t g = 0; g < config_.kernel_block_sizes.size(); ++g) {
      if (!is_on_device(config_.plan.groups[g])) continue;
      // A group without a layer in this stage has no kernel that would ask for a size.
      const bool nobody_asks = config_.plan.groups[g].layer_names.empty();
      told.push_back(nobody_asks ? views.kernel_block_sizes[told.size()]
                                 : config_.kernel_block_sizes[g]);
    }
    if (std::ranges::equal(views.kernel_block_sizes, told)) return {};
    return fail("kernel_block_sizes: [{}], where the views of this plan have [{}]",
                fmt::join(told, ", "), fmt::join(views.kernel_block_sizes, ", "));
  }

  std::int64_t page_bytes(std::size_t tensor) const {
    return config_.plan.tensors[tensor].size_bytes / config_.plan.num_blocks;
  }

  void add_pages() {
    for (std::size_t t = 0; t < config_.plan.tensors.size(); ++t)
      caches_.pages.push_back({.base = bases_[t],
                               .block_stride = page_bytes(t),
                               .size_bytes = page_bytes(t),
                               .tensor_offset = 0,
                               .tensor = static_cast<std::int32_t>(t),
                               .unit_bytes = widest_unit({page_bytes(t), begins_[t]})});
  }

  // The tensor that byte `offset` of the tensor, or of the allocation of all of them, lies in.
  // Views that kernels are given may lead anywhere.
  std::size_t tensor_at(std::size_t tensor, std::int64_t offset) const {
    if (end_ == 0) return tensor;
    offset = std::clamp<std::int64_t>(offset, 0, end_ - 1);
    return std::ranges::upper_bound(begins_, offset) - begins_.begin() - 1;
  }
  // Where the offsets of a tensor's views count from.
  std::byte* origin(std::size_t tensor) const { return bases_[tensor] - begins_[tensor]; }

  std::size_t tensor_of(const std::string& layer, const LayerViews& own) const {
    if (end_ > 0) {
      const TensorView& view = own.tensors.front();
      return tensor_at(0, view.storage_offset * itemsize_bytes(view.dtype));
    }
    for (std::size_t t = 0; t < config_.plan.tensors.size(); ++t)
      if (std::ranges::count(config_.plan.tensors[t].shared_by, layer) > 0) return t;
    LS_CHECK(false, "{} has no tensor", layer);
    return 0;
  }

  Result<void> add_group(std::size_t g, const std::vector<LayerViews>& group_views,
                         const std::vector<LayerViews>& own_views) {
    const KVCacheGroupSpec& group = config_.plan.groups[g];
    RegionRange states{static_cast<std::int32_t>(caches_.states.size()), 0};
    RegionRange regions{static_cast<std::int32_t>(caches_.regions.size()), 0};
    std::int64_t split = 1;
    for (std::size_t i = 0; i < group.layer_names.size(); ++i) {
      const auto layer = static_cast<std::int32_t>(caches_.rows.size());
      caches_.group_of_layer.push_back(static_cast<std::int32_t>(g));
      caches_.table_of_layer.push_back(static_cast<std::int32_t>(g));
      caches_.draft_module_of_layer.push_back(draft_module_of(config_.plan, group.layer_names[i]));
      caches_.tensor_of_layer.push_back(-1);
      caches_.last_tensor_of_layer.push_back(-2);
      caches_.rows.emplace_back().layer = places_[layer].number;
      if (i >= group_views.size()) continue;  // encoder-only: keeps nothing
      const LayerViews& views = group_views[i];
      const LayerViews& own = own_views[i];
      const std::size_t tensor = tensor_of(group.layer_names[i], own);
      caches_.tensor_of_layer.back() = static_cast<std::int32_t>(tensor);
      caches_.last_tensor_of_layer.back() = static_cast<std::int32_t>(tensor);
      if (views.kernel_block_size == 0) {
        add_states(views, tensor, layer);
        add_state_shapes(group.layer_spec(i), static_cast<std::int32_t>(g), layer);
        continue;
      }
      const bool is_mapped = views.kernel_block_stride != 0;
      caches_.table_of_layer.back() =
          is_mapped ? add_mapped_table(g, views) : caches_.group_of_layer.back();
      if (!is_mapped) split = views.blocks_per_kv_block;
      caches_.rows.back() = row_cache(views, tensor, layer);
      caches_.rows.back().token_rows = token_rows(group.layer_spec(i).tokens_per_state);
      caches_.rows.back().is_ring = is_ring(group.spec.kind);
      if (group.spec.sink_len > 0) {  // after the null block
        caches_.rows.back().sink_blocks =
            static_cast<std::int32_t>(group.spec.sink_len / views.kernel_block_size);
        caches_.rows.back().first_sink_block = static_cast<std::int32_t>(views.blocks_per_kv_block);
      }
      const RowCache rows = row_cache(own, tensor, layer);
      const std::int64_t last_row =
          (rows.num_parts - 1) * rows.part_stride + (rows.num_kv_heads - 1) * rows.head_stride;
      caches_.last_tensor_of_layer.back() =
          static_cast<std::int32_t>(tensor_at(tensor, rows.base - origin(tensor) + last_row));
      if (auto added = add_row_regions(rows, own, tensor); !added)
        return fail("{}: {}", group.layer_names[i], added.error().message);
    }
    states.end = static_cast<std::int32_t>(caches_.states.size());
    regions.end = static_cast<std::int32_t>(caches_.regions.size());
    caches_.states_of_group.push_back(states);
    caches_.regions_of_group.push_back(regions);
    caches_.blocks_per_kv_block.push_back(split);
    return {};
  }

  // Returns its number. Layers with the same mapping share a table.
  std::int32_t add_mapped_table(std::size_t group, const LayerViews& views) {
    const std::int64_t split = views.blocks_per_kv_block;
    const MappedTable table{static_cast<std::int32_t>(group), split, views.kernel_block_stride};
    auto at = std::ranges::find(caches_.mapped_tables, table);
    if (at == caches_.mapped_tables.end()) at = caches_.mapped_tables.insert(at, table);
    return static_cast<std::int32_t>(config_.plan.groups.size() +
                                     static_cast<std::size_t>(at - caches_.mapped_tables.begin()));
  }

  RowCache row_cache(const LayerViews& views, std::size_t tensor, std::int32_t layer) const {
    const TensorView& view = views.tensors.front();
    const std::int64_t item = itemsize_bytes(view.dtype);
    LS_CHECK(view.stride.back() == 1, "elements of a row are {} apart", view.stride.back());
    const auto stride = [&](std::int32_t dim) { return dim < 0 ? 0 : item * view.stride[dim]; };
    RowCache cache;
    cache.base = origin(tensor) + item * view.storage_offset;
    cache.block_stride = stride(views.block_dim);
    cache.token_stride = stride(views.token_dim);
    cache.head_stride = stride(views.head_dim);
    cache.part_stride = stride(views.kv_dim);
    cache.block_size = make_divisor(static_cast<std::uint32_t>(views.kernel_block_size));
    cache.num_parts = views.kv_dim < 0 ? 1 : 2;
    cache.num_kv_heads =
        views.head_dim < 0 ? 1 : static_cast<std::int32_t>(view.shape[views.head_dim]);
    cache.head_size = static_cast<std::int32_t>(view.shape.back());
    cache.row_bytes = static_cast<std::int32_t>(item * view.shape.back());
    const LayerOfModel& place = places_[layer];
    cache.layer = place.number;
    cache.first_head = place.head_begin;
    cache.first_query_head = place.query_begin;
    cache.queries_per_kv = place.queries_per_kv;
    cache.dtype = view.dtype;
    cache.unit_bytes =
        widest_unit({cache.base - origin(tensor), cache.block_stride, cache.token_stride,
                     cache.head_stride, cache.part_stride, cache.row_bytes});
    return cache;
  }

  // The bytes of one manager block that rows lie in, as runs relative to kernel block 0 of it.
  Result<std::vector<Extent>> runs_of_block(const RowCache& cache, std::int64_t split) const {
    if (end_ > 0) return runs_of_rows(cache, split);
    const std::int64_t tokens = cache.block_size.value;
    const std::int64_t dense = tokens * cache.num_kv_heads * cache.row_bytes;
    const std::int64_t span = (tokens - 1) * cache.token_stride +
                              (cache.num_kv_heads - 1) * cache.head_stride + cache.row_bytes;
    if (span != dense)
      return fail("the rows of a kernel block take {} bytes spread over {}", dense, span);
    std::vector<Extent> runs;
    for (std::int64_t block = 0; block < split; ++block)
      for (std::int64_t part = 0; part < cache.num_parts; ++part) {
        const std::int64_t begin = block * cache.block_stride + part * cache.part_stride;
        runs.push_back({begin, begin + dense});
      }
    return merged_runs(std::move(runs));
  }

  // K and V of a token and head side by side, heads anywhere.
  static std::vector<Extent> runs_of_rows(const RowCache& cache, std::int64_t split) {
    std::vector<Extent> runs;
    for (std::int64_t block = 0; block < split; ++block)
      for (std::int64_t part = 0; part < cache.num_parts; ++part)
        for (std::int64_t head = 0; head < cache.num_kv_heads; ++head)
          for (std::int64_t token = 0; token < cache.block_size.value; ++token) {
            const std::int64_t begin = block * cache.block_stride + part * cache.part_stride +
                                       head * cache.head_stride + token * cache.token_stride;
            runs.push_back({begin, begin + cache.row_bytes});
          }
    return merged_runs(std::move(runs));
  }

  static std::vector<Extent> merged_runs(std::vector<Extent> runs) {
    std::ranges::sort(runs, {}, &Extent::begin);
    std::vector<Extent> merged;
    for (const Extent& run : runs) {
      if (!merged.empty() && merged.back().end == run.begin)
        merged.back().end = run.end;
      else
        merged.push_back(run);
    }
    return merged;
  }

  Result<void> add_row_regions(const RowCache& cache, const LayerViews& views, std::size_t tensor) {
    LS_ASSIGN_OR_RETURN(auto runs, runs_of_block(cache, views.blocks_per_kv_block));
    for (const Extent& run : runs)
      caches_.regions.push_back(region(tensor, cache.base - origin(tensor) + run.begin,
                                       kernel_block_stride(views) * cache.block_stride,
                                       run.end - run.begin));
    return {};
  }

  // `offset`: from the tensor's origin.
  BlockRegion region(std::size_t first_tensor, std::int64_t offset, std::int64_t block_stride,
                     std::int64_t size_bytes) const {
    const std::size_t tensor = tensor_at(first_tensor, offset);
    return {.base = origin(tensor) + offset,
            .block_stride = block_stride,
            .size_bytes = size_bytes,
            .tensor_offset = offset - begins_[tensor],
            .tensor = static_cast<std::int32_t>(tensor),
            .unit_bytes = widest_unit({offset, block_stride, size_bytes, page_bytes(tensor)})};
  }

  void add_states(const LayerViews& views, std::size_t tensor, std::int32_t layer) {
    for (std::size_t s = 0; s < views.tensors.size(); ++s) {
      const TensorView& view = views.tensors[s];
      const std::int64_t item = itemsize_bytes(view.dtype);
      std::int64_t size_bytes = item;
      for (std::size_t dim = 1; dim < view.shape.size(); ++dim) size_bytes *= view.shape[dim];
      const std::int64_t offset = item * view.storage_offset;
      const std::int64_t page_stride = item * view.stride.front();
      const BlockRegion state = region(tensor, offset, page_stride, size_bytes);
      caches_.regions.push_back(state);
      caches_.states.push_back({.base = state.base,
                                .page_stride = page_stride,
                                .size_bytes = size_bytes,
                                .unit_bytes = widest_unit({offset, page_stride, size_bytes}),
                                .layer = places_[layer].number,
                                .first_head = places_[layer].head_begin,
                                .state = static_cast<std::int32_t>(s)});
    }
  }

  void add_state_shapes(const KVCacheSpec& spec, std::int32_t group, std::int32_t layer) {
    for (const StateTensorSpec& state : spec.states)
      caches_.state_shapes.push_back(
          {.dims = state.dims,
           .dtype = state.dtype,
           .group = group,
           .layer = layer,
           .num_drafts = static_cast<std::int32_t>(spec.num_speculative_blocks)});
  }

  // A block owns its page, or half a page of K and half of V where a layout keeps them apart.
  void add_poison_regions(const PoolViews& views) {
    if (end_ > 0) {
      caches_.poison_regions = caches_.pages;
      return;
    }
    std::vector<bool> apart(config_.plan.tensors.size(), false);
    for (std::size_t g = 0; g < views.groups.size(); ++g)
      for (std::size_t i = 0; i < views.groups[g].size(); ++i) {
        const LayerViews& layer = views.groups[g][i];
        if (layer.kv_dim < 0) continue;
        const std::size_t t = tensor_of(config_.plan.groups[g].layer_names[i], layer);
        const TensorView& view = layer.tensors.front();
        const std::int64_t block_bytes =
            itemsize_bytes(view.dtype) * view.stride[layer.block_dim] * layer.blocks_per_kv_block;
        if (2 * block_bytes == page_bytes(t)) apart[t] = true;
      }
    for (std::size_t t = 0; t < apart.size(); ++t) {
      const std::int64_t page = page_bytes(t);
      if (!apart[t]) {
        caches_.poison_regions.push_back(caches_.pages[t]);
        continue;
      }
      for (std::int64_t half = 0; half < 2; ++half)
        caches_.poison_regions.push_back(
            region(t, half * config_.plan.num_blocks * (page / 2), page / 2, page / 2));
    }
  }

  const BackendConfig& config_;
  std::span<const LayerOfModel> places_;
  std::span<std::byte* const> bases_;
  std::vector<std::int64_t> begins_;  // of tensors in one allocation; 0: each has its own
  std::int64_t end_ = 0;              // of that allocation; 0: there is none
  LayerCaches caches_;
};

}  // namespace

std::int32_t source_group(std::span<const KVCacheGroupSpec> groups) {
  for (std::size_t g = 0; g < groups.size(); ++g)
    if (is_sparse_source(groups[g])) return static_cast<std::int32_t>(g);
  return -1;
}

Result<KVCacheConfig> bind_sparse_groups(KVCacheConfig plan) {
  const std::int32_t at = source_group(plan.groups);
  if (at < 0) return plan;
  KVCacheGroupSpec& source = plan.groups[static_cast<std::size_t>(at)];
  std::size_t num_resident = 0, num_hot = 0;
  for (KVCacheGroupSpec& group : plan.groups) {
    if (!keeps_pages(group.spec)) continue;
    std::size_t& bound = is_hot_pages(group.spec.kind) ? num_hot : num_resident;
    LS_RETURN_IF_ERROR(bind_group(source, bound, group));
    bound += group.layer_names.size();
  }
  if (num_resident != source.layer_names.size() || num_hot != num_resident)
    return fail("host pages: {} resident and {} hot layers for {} of the source", num_resident,
                num_hot, source.layer_names.size());
  source.residence = Residence::host;
  source.layer_specs.clear();
  return plan;
}

ViewOptions view_options(const BackendConfig& config) {
  return {.backend = config.attention_backend,
          .layout = config.layout,
          .rule = config.layout_rule,
          .mapped_kernel_blocks = config.mapped_kernel_blocks};
}

Result<LayerCaches> layer_caches(const BackendConfig& config, std::span<const LayerOfModel> places,
                                 std::span<std::byte* const> tensor_bases, const PoolViews* given) {
  LS_CHECK(tensor_bases.size() == config.plan.tensors.size(), "{} bases for {} tensors",
           tensor_bases.size(), config.plan.tensors.size());
  LS_CHECK(config.plan.num_blocks > 0, "{} blocks", config.plan.num_blocks);
  return Builder(config, places, tensor_bases).build(given);
}

void add_block_ranges(const LayerCaches& layers, std::int32_t tensor, std::int32_t block,
                      std::vector<MemoryRange>& ranges) {
  for (const BlockRegion& region : layers.poison_regions)
    if (region.tensor == tensor) ranges.push_back(range_in_block(region, block));
}

void add_layer_ranges(const LayerCaches& layers, std::size_t layer, std::int32_t block,
                      std::vector<MemoryRange>& ranges) {
  const std::int32_t last = layers.last_tensor_of_layer[layer];
  for (std::int32_t tensor = layers.tensor_of_layer[layer]; tensor <= last; ++tensor)
    add_block_ranges(layers, tensor, block, ranges);
}

}  // namespace lockstep::cuda
