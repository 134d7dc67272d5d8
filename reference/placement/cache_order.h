// The six layouts of [L, B, H, N, C] in memory, outermost first, and the one stride function for
// all of them (vllm/v1/kv_cache_layout.py, compute_layout_strides).
//
// LBNHC (old name NHD) and LBHNC (HND) keep a layer together, BLNHC and BLHNC a block; LHBNC and
// BHLNC separate the heads of one page.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "reference/placement/cache_spec.h"
#include "reference/types/view_types.h"

namespace lockstep {

// Of one of the six; NHD and HND name LBNHC and LBHNC.
std::optional<CacheLayout> overlaid_layout_from_name(std::string_view name);

constexpr bool is_block_outermost(CacheLayout order) { return order >= CacheLayout::BLNHC; }
// The bytes of a page are one run.
constexpr bool is_block_compact(CacheLayout order) {
  return order != CacheLayout::LHBNC && order != CacheLayout::BHLNC;
}

// Byte strides along L, B, H, N, C.
struct OrderStrides {
  std::int64_t layer = 0, block = 0, head = 0, row = 0, byte = 1;
};
// `kernel_block_size` 0: blocks are not split. A stride that is not 0 in layer_stride or
// block_stride is fixed from outside, and what lies outside it counts from it. An Error: a padded
// page whose heads or rows lie outside layers or blocks, or a padded block that is split.
Result<OrderStrides> order_strides(const KVCacheSpec& spec, std::int64_t num_blocks,
                                   std::int64_t num_layers, CacheLayout order,
                                   std::int64_t kernel_block_size = 0,
                                   std::int64_t layer_stride = 0, std::int64_t block_stride = 0);

// The layouts that a set of backends supports, best first: identical lists stay; different lists
// are intersected, layouts with the most first places first. An empty list in `declared` accepts
// any.
// An Error: no layout is in all of them.
Result<std::vector<CacheLayout>> supported_orders(
    const std::vector<std::vector<CacheLayout>>& declared);

struct ChosenOrder {
  CacheLayout order = CacheLayout::LBNHC;
  std::string_view by;  // option, connector, backends, default
};
// `asked` is the user's, `connector` the connector's preference; `declared`: some backend has a
// list.
// An Error: the user's layout is not a candidate, or there is none.
Result<ChosenOrder> choose_order(const std::vector<CacheLayout>& supported, bool declared,
                                 const NamedCacheSpecs& specs,
                                 const std::optional<std::string>& asked,
                                 std::optional<CacheLayout> connector);

}  // namespace lockstep
