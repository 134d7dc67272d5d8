#include "reference/placement/cache_order.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>
#include <tuple>

namespace lockstep {
namespace {

// In the engine's order.
constexpr std::array kOrders = {CacheLayout::LBHNC, CacheLayout::LBNHC, CacheLayout::LHBNC,
                                CacheLayout::BLHNC, CacheLayout::BLNHC, CacheLayout::BHLNC};
constexpr std::string_view kDimensions = "LBHNC";
// The preference where no backend declares one.
constexpr std::array kPreference = {CacheLayout::LBNHC, CacheLayout::LBHNC, CacheLayout::BLNHC,
                                    CacheLayout::BLHNC, CacheLayout::BHLNC, CacheLayout::LHBNC};

std::string list_of(const std::vector<CacheLayout>& orders) {
  std::vector<std::string_view> names;
  for (const CacheLayout order : orders) names.push_back(name_of(order));
  return fmt::format("{}", fmt::join(names, ", "));
}

}  // namespace

std::optional<CacheLayout> overlaid_layout_from_name(std::string_view name) {
  const auto layout = cache_layout_from_name(name);
  if (layout == CacheLayout::NHD) return CacheLayout::LBNHC;
  if (layout == CacheLayout::HND) return CacheLayout::LBHNC;
  return layout;
}

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
          "a padded page cannot be split into kernel blocks; use blocks that every kernel "
          "takes whole");
    std::int64_t outside = 1;
    for (std::size_t i = 0; i <= grid_end; ++i) outside *= sizes[kDimensions.find(nest[i])];
    if (outside != num_layers * num_blocks)
      return fail(
          fmt::format("order {} cannot pad pages: their heads or rows lie outside layers "
                      "and blocks; use a block-compact order",
                      nest));
  }
  std::int64_t strides[5] = {};
  std::int64_t stride = 1;
  for (std::size_t i = nest.size(); i-- > 0;) {
    const std::size_t dimension = kDimensions.find(nest[i]);
    if (padded != 0 && i == grid_end) {
      stride = std::max(stride, padded);
      if (stride % padded != 0)
        return fail(fmt::format("a stride of {} bytes is no multiple of padded pages of {} bytes",
                                stride, padded));
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
  if (orders.empty()) return fail("no order of the cache is in the lists of all backends");
  return orders;
}

Result<ChosenOrder> choose_order(const std::vector<CacheLayout>& supported, bool declared,
                                 const NamedCacheSpecs& specs,
                                 const std::optional<std::string>& asked,
                                 std::optional<CacheLayout> connector) {
  std::set<std::tuple<std::int64_t, std::int64_t, std::int64_t>> shapes;
  std::set<std::int64_t> pages;
  std::set<bool> sharding;
  for (const auto& [name, spec] : specs) {
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
        "pages that differ in heads, rows or bytes need a block-compact order, and no backend "
        "of this model takes one");
  if (sharding.size() > 1 && pages.size() > 1)
    std::erase_if(orders, [](CacheLayout order) { return !is_block_outermost(order); });
  if (orders.empty())
    return fail(
        "caches that DCP shards and replicated ones of other page sizes need an order "
        "with blocks outermost, and no backend of this model takes one");
  const auto is_candidate = [&](CacheLayout order) {
    return std::ranges::find(orders, order) != orders.end();
  };
  if (asked) {
    const auto order = overlaid_layout_from_name(*asked);
    if (!order || !is_candidate(*order))
      return fail(
          fmt::format("the order {} does not suit this model and its backends; one of {} "
                      "does",
                      *asked, list_of(orders)));
    return ChosenOrder{*order, "option"};
  }
  if (connector && is_candidate(*connector)) return ChosenOrder{*connector, "connector"};
  return ChosenOrder{orders[0], declared ? "backends" : "default"};
}

}  // namespace lockstep
