#include "cuda_backend/views/layer_caches.h"

#include <fmt/format.h>

#include <algorithm>
#include <initializer_list>
#include <utility>

#include "base/check.h"

namespace lockstep::cuda {
namespace {

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
      : config_(config), places_(places), bases_(bases) {}

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
      if (config_.plan.groups[g].spec.kind == CacheKind::encoder_only) continue;
      // A group without a layer in this stage has no kernel that would ask for a size.
      const bool nobody_asks = config_.plan.groups[g].layer_names.empty();
      told.push_back(nobody_asks ? views.kernel_block_sizes[told.size()]
                                 : config_.kernel_block_sizes[g]);
    }
    if (std::ranges::equal(views.kernel_block_sizes, told)) return {};
    return fail(fmt::format("kernel_block_sizes: [{}], where the views of this plan have [{}]",
                            fmt::join(told, ", "), fmt::join(views.kernel_block_sizes, ", ")));
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
                               .unit_bytes = widest_unit({page_bytes(t)})});
  }

  std::size_t tensor_of(const std::string& layer) const {
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
      caches_.tensor_of_layer.push_back(-1);
      caches_.rows.emplace_back().layer = places_[layer].number;
      if (i >= group_views.size()) continue;  // encoder-only: keeps nothing
      const LayerViews& views = group_views[i];
      const std::size_t tensor = tensor_of(group.layer_names[i]);
      caches_.tensor_of_layer.back() = static_cast<std::int32_t>(tensor);
      if (views.kernel_block_size == 0) {
        add_states(views, tensor, layer);
        add_state_shapes(group.layer_spec(i), static_cast<std::int32_t>(g));
        continue;
      }
      if (group.layer_spec(i).compress_ratio > 1)
        return fail(
            fmt::format("{}: rows that stand for several tokens (compress_ratio {}) have no "
                        "content of their own",
                        group.layer_names[i], group.layer_spec(i).compress_ratio));
      split = views.blocks_per_kv_block;
      caches_.rows.back() = row_cache(views, tensor, layer);
      const LayerViews& own = own_views[i];
      if (auto added =
              add_row_regions(row_cache(own, tensor, layer), own.blocks_per_kv_block, tensor);
          !added)
        return fail(fmt::format("{}: {}", group.layer_names[i], added.error().message));
    }
    states.end = static_cast<std::int32_t>(caches_.states.size());
    regions.end = static_cast<std::int32_t>(caches_.regions.size());
    caches_.states_of_group.push_back(states);
    caches_.regions_of_group.push_back(regions);
    caches_.blocks_per_kv_block.push_back(split);
    return {};
  }

  RowCache row_cache(const LayerViews& views, std::size_t tensor, std::int32_t layer) const {
    const TensorView& view = views.tensors.front();
    const std::int64_t item = itemsize_bytes(view.dtype);
    LS_CHECK(view.stride.back() == 1, "elements of a row are {} apart", view.stride.back());
    const auto stride = [&](std::int32_t dim) { return dim < 0 ? 0 : item * view.stride[dim]; };
    RowCache cache;
    cache.base = bases_[tensor] + item * view.storage_offset;
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
        widest_unit({cache.base - bases_[tensor], cache.block_stride, cache.token_stride,
                     cache.head_stride, cache.part_stride, cache.row_bytes});
    return cache;
  }

  // The bytes of one manager block that rows lie in, as runs relative to kernel block 0 of it.
  static Result<std::vector<Extent>> runs_of_block(const RowCache& cache, std::int64_t split) {
    const std::int64_t tokens = cache.block_size.value;
    const std::int64_t dense = tokens * cache.num_kv_heads * cache.row_bytes;
    const std::int64_t span = (tokens - 1) * cache.token_stride +
                              (cache.num_kv_heads - 1) * cache.head_stride + cache.row_bytes;
    if (span != dense)
      return fail(
          fmt::format("the rows of a kernel block take {} bytes spread over {}", dense, span));
    std::vector<Extent> runs;
    for (std::int64_t block = 0; block < split; ++block)
      for (std::int64_t part = 0; part < cache.num_parts; ++part) {
        const std::int64_t begin = block * cache.block_stride + part * cache.part_stride;
        runs.push_back({begin, begin + dense});
      }
    std::ranges::sort(runs, {}, &Extent::begin);
    std::vector<Extent> merged;
    for (const Extent& run : runs) {
      if (!merged.empty() && merged.back().end == run.begin) {
        merged.back().end = run.end;
      } else {
        merged.push_back(run);
      }
    }
    return merged;
  }

  Result<void> add_row_regions(const RowCache& cache, std::int64_t split, std::size_t tensor) {
    LS_ASSIGN_OR_RETURN(auto runs, runs_of_block(cache, split));
    for (const Extent& run : runs)
      caches_.regions.push_back(region(tensor, cache.base - bases_[tensor] + run.begin,
                                       split * cache.block_stride, run.end - run.begin));
    return {};
  }

  BlockRegion region(std::size_t tensor, std::int64_t offset, std::int64_t block_stride,
                     std::int64_t size_bytes) const {
    return {.base = bases_[tensor] + offset,
            .block_stride = block_stride,
            .size_bytes = size_bytes,
            .tensor_offset = offset,
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

  void add_state_shapes(const KVCacheSpec& spec, std::int32_t group) {
    for (const StateTensorSpec& state : spec.states)
      caches_.state_shapes.push_back(
          {.dims = state.dims,
           .dtype = state.dtype,
           .group = group,
           .num_drafts = static_cast<std::int32_t>(spec.num_speculative_blocks)});
  }

  // A block owns its page, or half a page of K and half of V where a layout keeps them apart.
  void add_poison_regions(const PoolViews& views) {
    std::vector<bool> apart(config_.plan.tensors.size(), false);
    for (std::size_t g = 0; g < views.groups.size(); ++g)
      for (std::size_t i = 0; i < views.groups[g].size(); ++i) {
        const LayerViews& layer = views.groups[g][i];
        if (layer.kv_dim < 0) continue;
        const std::size_t t = tensor_of(config_.plan.groups[g].layer_names[i]);
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
  LayerCaches caches_;
};

}  // namespace

ViewOptions view_options(const BackendConfig& config) {
  return {.backend = config.attention_backend, .layout = config.layout, .rule = config.layout_rule};
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

}  // namespace lockstep::cuda
