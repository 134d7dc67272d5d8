#include "reference/memory/model_placement.h"

#include <algorithm>
#include <map>
#include <utility>

#include "base/check.h"
#include "reference/placement/worker_pages.h"
#include "reference/plan/grouping.h"
#include "reference/plan/page_groups.h"
#include "reference/plan/page_size.h"

namespace lockstep {
namespace {

std::int64_t row_bytes(const KVCacheSpec& spec) {
  return row_elements(spec) * itemsize_bytes(spec.dtype);
}
bool has_slots_of_values(const KVCacheSpec& spec) {
  return !has_single_rows(spec) && spec.kv_quant_mode == KVQuantMode::nvfp4;
}

// The spec with the shape of its page.
Result<KVCacheSpec> with_page_shape(const std::string& name, KVCacheSpec spec) {
  if (keeps_nothing(spec.kind) || keeps_pages(spec.kind))
    return fail("{}: a cache of kind {}", name, name_of(spec.kind));
  spec.dcp_sharded = is_dealt_out(spec);
  if (is_state_kind(spec.kind)) return spec;
  if (keeps_pairs(spec) && head_size_v(spec) != spec.head_size)
    return fail("{}: K and V in rows of {} and {} elements", name, spec.head_size,
                head_size_v(spec));
  const std::int64_t parts = has_single_rows(spec) || has_slots_of_values(spec) ? 1 : 2;
  spec.plan.num_head_slots = has_slots_of_values(spec) ? 2 * spec.num_kv_heads : spec.num_kv_heads;
  spec.plan.state_content_bytes = parts * row_bytes(spec);
  LS_CHECK(unpadded_page_bytes(spec) == unpadded_page_size_bytes(spec), "{}: pages of {} and {}",
           name, unpadded_page_bytes(spec), unpadded_page_size_bytes(spec));
  return spec;
}

Result<std::vector<KVCacheGroupSpec>> placed_groups(const KVCacheConfig& plan) {
  std::vector<KVCacheGroupSpec> groups;
  for (const KVCacheGroupSpec& group : plan.groups) {
    if (!is_on_device(group)) continue;
    if (group.layers_per_page > 1)
      return fail(
          "{} layers of a group share a page; releases with these orders have no such packing",
          group.layers_per_page);
    KVCacheGroupSpec& placed = groups.emplace_back();
    placed.layer_names = group.layer_names;
    const std::string name = group.layer_names.empty() ? "a group" : group.layer_names.front();
    LS_ASSIGN_OR_RETURN(placed.spec, with_page_shape(name, group.spec));
    for (std::size_t i = 0; group.is_uniform_type() && i < group.layer_names.size(); ++i) {
      LS_ASSIGN_OR_RETURN(placed.layer_specs.emplace_back(),
                          with_page_shape(group.layer_names[i], group.layer_spec(i)));
    }
  }
  return groups;
}

// Byte offsets in the allocation, and the page of each tensor that begins there.
using TensorPages = std::map<std::int64_t, std::int64_t>;

struct LayerInAllocation {
  LayerLayout layout;      // without tensors, offsets as in the allocation
  std::int64_t begin = 0;  // of the first tensor
  std::int64_t slots = 0;  // head slots
  std::int64_t apart = 0;  // bytes between tensors of head slots; 0: all in one
  std::int64_t page = 0;   // of each tensor
};

class Placer {
 public:
  Placer(const KVCacheConfig& plan, AttentionBackend chosen, CacheLayout order)
      : plan_(plan), chosen_(chosen), order_(order) {}

  Result<PoolLayout> place() {
    if (has_host_pages(plan_.groups) && !is_block_outermost(order_))
      return fail("resident pages and hot regions lie in orders with blocks outermost");
    LS_ASSIGN_OR_RETURN(const auto groups, placed_groups(plan_));
    LS_ASSIGN_OR_RETURN(const Placement placement,
                        place_blocks(groups, order_, plan_.num_blocks, PlacementOptions{}));
    LS_ASSIGN_OR_RETURN(const auto kernels, placed_kernel_sizes(plan_, chosen_));
    std::vector<std::vector<LayerInAllocation>> layers(plan_.groups.size());
    for (std::size_t g = 0; g < plan_.groups.size(); ++g) {
      const KVCacheGroupSpec& group = plan_.groups[g];
      for (std::size_t i = 0; i < group.layer_names.size(); ++i) {
        if (!is_on_device(group)) {
          layers[g].emplace_back();
          continue;
        }
        LS_ASSIGN_OR_RETURN(auto layer, layer_at(placement, group, i, kernels[g]));
        layers[g].push_back(std::move(layer));
      }
    }
    return in_tensors(layers);
  }

 private:
  Result<LayerInAllocation> layer_at(const Placement& placement, const KVCacheGroupSpec& group,
                                     std::size_t index, std::int64_t kernel) {
    const std::string& name = group.layer_names[index];
    const KVCacheSpec& spec = group.layer_spec(index);
    const auto tensor = std::ranges::find_if(placement.tensors, [&](const PlacedTensor& one) {
      return std::ranges::find(one.layers, name) != one.layers.end();
    });
    LS_CHECK(tensor != placement.tensors.end(), "{} has no tensor", name);
    const auto page = first_page(*tensor, order_, plan_.num_blocks,
                                 is_state_kind(spec.kind) ? spec.block_size : kernel);
    if (!page) return fail("{}: {}", name, page.error().message);
    LayerInAllocation layer;
    LayerLayout& at = layer.layout;
    const std::int64_t place = std::ranges::find(tensor->layers, name) - tensor->layers.begin();
    const std::int64_t begin = tensor->offset + place * tensor->layer_stride;
    at.kind = spec.kind;
    at.num_blocks = plan_.num_blocks;
    at.real_page_size_bytes = unpadded_page_size_bytes(spec);
    at.block_size = storage_block_size(spec);
    at.block_stride_bytes = tensor->block_stride;
    layer.slots = page->heads;
    layer.begin = is_block_outermost(order_) ? 0 : begin;
    layer.page = tensor->block_stride;
    at.base_offset_bytes = begin - layer.begin;
    if (order_ == CacheLayout::LHBNC) layer.apart = page->head_stride;
    if (is_state_kind(spec.kind))
      LS_RETURN_IF_ERROR(place_states(name, spec, at));
    else
      place_rows(spec, *page, layer);
    return layer;
  }

  static Result<void> place_states(const std::string& name, const KVCacheSpec& spec,
                                   LayerLayout& at) {
    std::int64_t offset = at.base_offset_bytes;
    for (const StateTensorSpec& state : spec.states) {
      for (const std::int64_t bytes : {at.block_stride_bytes, offset})
        if (bytes % itemsize_bytes(state.dtype) != 0)
          return fail("{}: byte {} of the cache is no whole {} element", name, bytes,
                      name_of(state.dtype));
      at.states.push_back({offset, num_elements(state), itemsize_bytes(state.dtype)});
      offset += size_bytes(state);
    }
    return {};
  }

  static void place_rows(const KVCacheSpec& spec, const CachePage& page, LayerInAllocation& layer) {
    LayerLayout& at = layer.layout;
    at.num_kv = has_single_rows(spec) ? 1 : 2;
    at.num_kv_heads = spec.num_kv_heads;
    at.head_size = row_elements(spec);
    at.element_size_bytes = itemsize_bytes(spec.dtype);
    at.blocks_per_kv_block = page.blocks / at.num_blocks;
    at.kernel_block_size = page.rows;
    at.kernel_block_stride_bytes = page.block_stride;
    at.token_stride_bytes = page.row_stride;
    at.head_stride_bytes = layer.apart != 0 ? 0 : page.head_stride;
    if (at.num_kv == 2)
      at.kv_stride_bytes =
          has_slots_of_values(spec) ? spec.num_kv_heads * at.head_stride_bytes : row_bytes(spec);
  }

  Result<PoolLayout> in_tensors(std::vector<std::vector<LayerInAllocation>>& layers) const {
    TensorPages pages;
    const auto add = [&](std::int64_t begin, std::int64_t page) {
      return pages.emplace(begin, page).first->second == page;
    };
    for (const auto& group : layers)
      for (const LayerInAllocation& layer : group)
        for (std::int64_t slot = 0; layer.page > 0 && slot < (layer.apart != 0 ? layer.slots : 1);
             ++slot)
          if (!add(layer.begin + slot * layer.apart, layer.page))
            return fail(
                "pages of several lengths begin at one byte; choose an order with blocks "
                "outermost, BLNHC");
    PoolLayout pool;
    pool.num_blocks = plan_.num_blocks;
    std::int64_t end = 0;
    for (const auto& [begin, page] : pages) {
      if (begin != end)
        return fail(
            "pages of several groups cross at byte {} of the cache; choose an order with blocks "
            "outermost, BLNHC",
            begin);
      pool.tensor_size_bytes.push_back(page * plan_.num_blocks);
      end = begin + pool.tensor_size_bytes.back();
    }
    for (auto& group : layers) {
      std::vector<LayerLayout>& placed = pool.groups.emplace_back();
      for (LayerInAllocation& layer : group) placed.push_back(in_tensor(layer, pages));
    }
    return pool;
  }

  static LayerLayout in_tensor(const LayerInAllocation& layer, const TensorPages& pages) {
    LayerLayout at = layer.layout;
    if (layer.page == 0) return at;
    const auto tensor = pages.find(layer.begin);
    at.tensor_index = static_cast<std::int32_t>(std::distance(pages.begin(), tensor));
    at.page_size_bytes = layer.page;
    at.tensor_size_bytes = layer.page * at.num_blocks;
    if (layer.apart == 0) return at;
    at.head_tensor_step = 1;
    if (at.num_kv == 2 && layer.slots == 2 * at.num_kv_heads)
      at.kv_tensor_step = static_cast<std::int32_t>(at.num_kv_heads);
    return at;
  }

  const KVCacheConfig& plan_;
  const AttentionBackend chosen_;
  const CacheLayout order_;
};

}  // namespace

Result<PoolLayout> placed_layout(const KVCacheConfig& plan, AttentionBackend chosen,
                                 CacheLayout order) {
  LS_CHECK(is_overlaid(order), "{} is no order of the cache", name_of(order));
  LS_ASSIGN_OR_RETURN(const KVCacheConfig rows, with_page_rows(plan));
  auto placed = Placer(rows, chosen, order).place();
  if (!placed) return fail("layout {}: {}", name_of(order), placed.error().message);
  return placed;
}

Result<std::vector<std::int64_t>> placed_kernel_sizes(const KVCacheConfig& given,
                                                      AttentionBackend chosen) {
  LS_ASSIGN_OR_RETURN(const KVCacheConfig plan, with_page_rows(given));
  std::vector<std::int64_t> sizes;
  for (std::size_t g = 0; g < plan.groups.size(); ++g) {
    if (!is_on_device(plan.groups[g])) {
      sizes.push_back(plan.groups[g].spec.block_size);
      continue;
    }
    LS_ASSIGN_OR_RETURN(const auto size, kernel_block_size(plan.groups[g], chosen, false, g));
    sizes.push_back(size);
  }
  return sizes;
}

std::optional<AttentionBackend> only_reader(const LayerSpecs& layers) {
  for (const NamedSpec& layer : layers) {
    const KVCacheSpec& spec = layer.spec;
    if (is_state_kind(spec.kind) || is_hidden_state(spec.kind)) continue;
    if (has_single_rows(spec)) {
      if (spec.cache_dtype_str == "fp8_ds_mla" || layer.name.ends_with("indexer"))
        return AttentionBackend::flashmla;
    } else if (spec.kv_quant_mode == KVQuantMode::nvfp4) {
      return AttentionBackend::flashinfer;
    } else if (is_per_token_head(spec.kv_quant_mode)) {
      return AttentionBackend::triton_attn;
    }
  }
  return std::nullopt;
}

Result<CacheLayout> placed_order(const KVCacheConfig& given, CacheLayout asked) {
  LS_ASSIGN_OR_RETURN(const KVCacheConfig plan, with_page_rows(given));
  LS_ASSIGN_OR_RETURN(const auto groups, placed_groups(plan));
  LS_ASSIGN_OR_RETURN(const auto supported, supported_orders({}));
  std::optional<std::string> option;
  if (asked != CacheLayout::NHD) option = std::string(name_of(asked));
  std::optional<CacheLayout> wish;  // of the connector of host pages
  if (has_host_pages(plan.groups)) wish = CacheLayout::BLHNC;
  LS_ASSIGN_OR_RETURN(const ChosenOrder chosen,
                      choose_order(supported, false, layers_of(groups), option, wish));
  return chosen.order;
}

KVCacheConfig with_placed_tensors(KVCacheConfig plan, const PoolLayout& placed) {
  plan.tensors.clear();
  for (const std::int64_t size_bytes : placed.tensor_size_bytes)
    plan.tensors.push_back({.size_bytes = size_bytes, .shared_by = {}});
  for (std::size_t g = 0; g < placed.groups.size(); ++g)
    for (std::size_t i = 0; i < placed.groups[g].size(); ++i) {
      const LayerLayout& layer = placed.groups[g][i];
      if (layer.page_size_bytes == 0) continue;  // keeps nothing
      for (std::int32_t t = layer.tensor_index; t <= last_tensor_of(layer); ++t)
        plan.tensors[t].shared_by.push_back(plan.groups[g].layer_names[i]);
    }
  return plan;
}

Result<PoolLayout> layout_of(const KVCacheConfig& plan, AttentionBackend chosen, CacheLayout layout,
                             LayoutRule rule) {
  return is_overlaid(layout) ? placed_layout(plan, chosen, layout)
                             : pool_layout(plan, chosen, layout, rule);
}

Result<KVCacheConfig> with_own_tensors(KVCacheConfig plan, AttentionBackend chosen,
                                       CacheLayout layout) {
  if (!is_overlaid(layout)) return plan;
  LS_ASSIGN_OR_RETURN(const PoolLayout placed, placed_layout(plan, chosen, layout));
  return with_placed_tensors(std::move(plan), placed);
}

}  // namespace lockstep
