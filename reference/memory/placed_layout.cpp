#include "reference/memory/model_placement.h"

#include <algorithm>
#include <iterator>
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
          "{} layers of a group share a page; releases with these layouts have no such packing",
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

// The strides of the plan's order in closed form. The worker's page has strides too, by
// order_strides(): the prover compares the two derivations, so neither may use the other.
PartRows rows_of(CacheLayout order, const PlacedTensor& tensor, std::int64_t index,
                 const CachePage& page, std::int64_t num_blocks) {
  const std::int64_t splits = page.blocks / num_blocks;
  const std::int64_t row = page.content_bytes, head = page.rows * row;
  PartRows part{.offset = tensor.offset + index * tensor.layer_stride,
                .block_stride = tensor.block_stride / splits * splits,
                .kernel_block_stride = tensor.block_stride / splits,
                .head_stride = head,
                .row_stride = row,
                .row_bytes = row,
                .kernel_blocks = splits,
                .heads = page.heads,
                .rows = page.rows};
  switch (order) {
    case CacheLayout::LBNHC:
    case CacheLayout::BLNHC:
      part.head_stride = row;
      part.row_stride = page.heads * row;
      break;
    case CacheLayout::LBHNC:
    case CacheLayout::BLHNC:
      break;
    case CacheLayout::LHBNC:
      part.head_stride = page.blocks * head;
      break;
    case CacheLayout::BHLNC:
      part.head_stride = std::ssize(tensor.layers) * head;
      break;
    case CacheLayout::NHD:
    case CacheLayout::HND:
      LS_CHECK(false, "{} is no order of an allocation", name_of(order));
  }
  return part;
}

// The tensor's layer of that index, in one part: rows of whole head slots. LHBNC has a region per
// head slot.
LayerMemory layer_in(const PlacedTensor& tensor, std::int64_t index, CacheLayout order,
                     const CachePage& page, std::int64_t num_blocks) {
  LayerMemory layer;
  layer.name = tensor.layers[static_cast<std::size_t>(index)];
  const PartRows& rows = layer.parts.emplace_back(rows_of(order, tensor, index, page, num_blocks));
  const std::int64_t begin = is_block_outermost(order) ? 0 : rows.offset;
  const std::int64_t regions = order == CacheLayout::LHBNC ? page.heads : 1;
  for (std::int64_t h = 0; h < regions; ++h)
    layer.regions.push_back(
        {begin + h * rows.head_stride, tensor.block_stride, tensor.block_stride});
  return layer;
}

// K and V of whole head slots; rows of both stay one part.
std::vector<PartRows> pair_of(const KVCacheSpec& spec, PartRows rows) {
  rows.row_bytes = row_bytes(spec);
  rows.heads = spec.num_kv_heads;
  if (has_single_rows(spec)) return {rows};
  PartRows values = rows;
  rows.kind = PartKind::k;
  values.kind = PartKind::v;
  values.offset += has_slots_of_values(spec) ? rows.heads * rows.head_stride : rows.row_bytes;
  return {rows, values};
}

Result<void> set_parts(const KVCacheSpec& spec, LayerMemory& layer) {
  const PartRows page = layer.parts.front();
  if (!is_state_kind(spec.kind)) {
    layer.parts = pair_of(spec, page);
    return {};
  }
  layer.parts = state_parts(spec, page.offset, page.block_stride);
  for (const PartRows& state : layer.parts)
    for (const std::int64_t bytes : {state.block_stride, state.offset - layer.regions[0].begin}) {
      const DType dtype = spec.states[static_cast<std::size_t>(state.part)].dtype;
      if (bytes % itemsize_bytes(dtype) != 0)
        return fail("{}: byte {} of the cache is no whole {} element", layer.name, bytes,
                    name_of(dtype));
    }
  return {};
}

// A tensor begins wherever a region does. Backends allocate and report by tensor, and no engine
// has such tensors: they must cover the allocation without a gap, or an order is refused.
Result<void> cut_into_tensors(MemoryPlan& plan) {
  std::map<std::int64_t, std::int64_t> pages;  // bytes of a page of the tensor that begins there
  for (const LayerMemory& layer : plan.layers)
    for (const BlockRegion& region : layer.regions)
      if (pages.emplace(region.begin, region.bytes).first->second != region.bytes)
        return fail(
            "pages of several lengths begin at one byte; choose a layout with blocks outermost, "
            "BLNHC");
  std::int64_t end = 0;
  for (const auto& [begin, page] : pages) {
    if (begin != end)
      return fail(
          "pages of several groups cross at byte {} of the cache; choose a layout with blocks "
          "outermost, BLNHC",
          begin);
    plan.tensor_size_bytes.push_back(page * plan.num_blocks);
    end = begin + plan.tensor_size_bytes.back();
  }
  const auto tensor_at = [&](std::int64_t begin) {
    return static_cast<std::int32_t>(std::distance(pages.begin(), pages.find(begin)));
  };
  for (LayerMemory& layer : plan.layers) {
    const BlockRegion& last = layer.regions.back();
    layer.begin = layer.regions.front().begin;
    layer.tensor = tensor_at(layer.begin);
    layer.last_tensor = tensor_at(last.begin);
    layer.end = last.begin + last.bytes * plan.num_blocks;
  }
  return {};
}

Result<MemoryPlan> overlaid_plan(const KVCacheConfig& config, AttentionBackend chosen,
                                 CacheLayout order) {
  if (has_host_pages(config.groups) && !is_block_outermost(order))
    return fail("resident pages and hot regions need layouts with blocks outermost");
  LS_ASSIGN_OR_RETURN(const auto groups, placed_groups(config));
  LS_ASSIGN_OR_RETURN(const Placement placement,
                      place_blocks(groups, order, config.num_blocks, PlacementOptions{}));
  LS_ASSIGN_OR_RETURN(const auto kernels, placed_kernel_sizes(config, chosen));
  MemoryPlan plan;
  plan.num_blocks = config.num_blocks;
  plan.layers_per_page.assign(config.groups.size(), 1);
  for (std::size_t g = 0; g < config.groups.size(); ++g) {
    if (!is_on_device(config.groups[g])) continue;
    for (std::size_t i = 0; i < config.groups[g].layer_names.size(); ++i) {
      const std::string& name = config.groups[g].layer_names[i];
      const KVCacheSpec& spec = config.groups[g].layer_spec(i);
      const auto tensor = std::ranges::find_if(placement.tensors, [&](const PlacedTensor& one) {
        return std::ranges::find(one.layers, name) != one.layers.end();
      });
      LS_CHECK(tensor != placement.tensors.end(), "{} has no tensor", name);
      const auto page = first_page(*tensor, order, plan.num_blocks,
                                   is_state_kind(spec.kind) ? spec.block_size : kernels[g]);
      if (!page) return fail("{}: {}", name, page.error().message);
      const auto index = std::ranges::find(tensor->layers, name) - tensor->layers.begin();
      LayerMemory& layer =
          plan.layers.emplace_back(layer_in(*tensor, index, order, *page, plan.num_blocks));
      layer.group = g;
      layer.layer = i;
      LS_RETURN_IF_ERROR(set_parts(spec, layer));
    }
  }
  LS_RETURN_IF_ERROR(cut_into_tensors(plan));
  return plan;
}

std::vector<PartRows> parts_of(const PartRows& page, const KVCacheSpec& spec) {
  if (!is_state_kind(spec.kind)) return {page};
  std::vector<PartRows> parts;
  PartRows part = page;
  part.kind = PartKind::state;
  for (const StateTensorSpec& state : spec.states) {
    part.row_bytes = size_bytes(state);
    parts.push_back(part);
    part.offset += part.row_bytes;
    ++part.part;
  }
  return parts;
}

}  // namespace

Result<MemoryPlan> placed_layout(const KVCacheConfig& plan, AttentionBackend chosen,
                                 CacheLayout order) {
  LS_CHECK(is_overlaid(order), "{} is no order of the cache", name_of(order));
  LS_ASSIGN_OR_RETURN(const KVCacheConfig rows, with_page_rows(plan));
  auto placed = overlaid_plan(rows, chosen, order);
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

KVCacheConfig with_placed_tensors(KVCacheConfig plan, const MemoryPlan& placed) {
  plan.tensors.clear();
  for (const std::int64_t size_bytes : placed.tensor_size_bytes)
    plan.tensors.push_back({.size_bytes = size_bytes, .shared_by = {}});
  for (const LayerMemory& layer : placed.layers)
    for (std::int32_t t = layer.tensor; t <= layer.last_tensor; ++t)
      plan.tensors[t].shared_by.push_back(layer.name);
  return plan;
}

Result<MemoryPlan> layout_of(const KVCacheConfig& plan, AttentionBackend chosen, CacheLayout layout,
                             LayoutRule rule) {
  return is_overlaid(layout) ? placed_layout(plan, chosen, layout)
                             : pool_layout(plan, chosen, layout, rule);
}

Result<KVCacheConfig> with_own_tensors(KVCacheConfig plan, AttentionBackend chosen,
                                       CacheLayout layout) {
  if (!is_overlaid(layout)) return plan;
  LS_ASSIGN_OR_RETURN(const MemoryPlan placed, placed_layout(plan, chosen, layout));
  return with_placed_tensors(std::move(plan), placed);
}

MemoryPlan memory_plan(const Placement& placed, const WorkerPages& pages) {
  MemoryPlan plan{.num_blocks = pages.num_blocks, .tensor_size_bytes = {pages.device_bytes}};
  plan.layers_per_page.assign(placed.groups.size(), 1);
  std::size_t index = 0;
  for (const PlacedTensor& tensor : placed.tensors) {
    if (!has_layer_views(tensor.spec.kind)) continue;
    for (std::size_t l = 0; l < tensor.layers.size(); ++l, ++index) {
      if (tensor.host_resident) continue;
      const LayerPage& layer = pages.layers[index];
      LS_CHECK(layer.name == tensor.layers[l], "{} has the page of {}", tensor.layers[l],
               layer.name);
      LayerMemory& at = plan.layers.emplace_back(layer_in(
          tensor, static_cast<std::int64_t>(l), placed.order, layer.page, pages.num_blocks));
      at.group = layer.group;
      at.layer = index;
      at.end = pages.device_bytes;
      at.parts = parts_of(at.parts.front(), layer.spec);
    }
  }
  return plan;
}

}  // namespace lockstep
