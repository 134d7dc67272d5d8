// The six orders in which [L, B, H, N, C] lies in memory, outermost first, and the one stride
// function that serves them all (vllm/v1/kv_cache_layout.py, compute_layout_strides).
//
// LBNHC (old name NHD) and LBHNC (HND) keep a layer together, BLNHC and BLHNC a block; under LHBNC
// and BHLNC the heads of one page lie apart.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "reference/placement/cache_spec.h"

namespace lockstep {

enum class CacheOrder : std::uint8_t { LBHNC, LBNHC, LHBNC, BLHNC, BLNHC, BHLNC };
inline constexpr std::array kCacheOrders = {CacheOrder::LBHNC, CacheOrder::LBNHC,
                                            CacheOrder::LHBNC, CacheOrder::BLHNC,
                                            CacheOrder::BLNHC, CacheOrder::BHLNC};
std::string_view name_of(CacheOrder order);
// NHD and HND name LBNHC and LBHNC.
std::optional<CacheOrder> cache_order_from_name(std::string_view name);

constexpr bool is_block_outermost(CacheOrder order) { return order >= CacheOrder::BLHNC; }
constexpr bool is_layer_compact(CacheOrder order) { return !is_block_outermost(order); }
// The bytes of a page are one run.
constexpr bool is_block_compact(CacheOrder order) {
  return order != CacheOrder::LHBNC && order != CacheOrder::BHLNC;
}

// Byte strides along L, B, H, N, C.
struct OrderStrides {
  std::int64_t layer = 0, block = 0, head = 0, row = 0, byte = 1;
};
// `kernel_block_size` 0: blocks are not split. A stride that is not 0 in layer_stride or
// block_stride is fixed from outside, and what lies outside it counts from it. An Error: a padded
// page whose heads or rows lie outside layers or blocks, or a padded block that is split.
Result<OrderStrides> order_strides(const CacheSpec& spec, std::int64_t num_blocks,
                                   std::int64_t num_layers, CacheOrder order,
                                   std::int64_t kernel_block_size = 0,
                                   std::int64_t layer_stride = 0, std::int64_t block_stride = 0);

// What a set of backends takes, best first: lists that are alike stay; of unlike lists what all of
// them hold, those that come first in most of them first. An empty list in `declared` takes any.
// An Error: nothing is in all of them.
Result<std::vector<CacheOrder>> supported_orders(
    const std::vector<std::vector<CacheOrder>>& declared);

struct ChosenOrder {
  CacheOrder order = CacheOrder::LBNHC;
  std::string_view by;  // option, connector, backends, default
};
// `asked` is the user's, `connector` the connector's wish; `declared`: some backend has a list.
// An Error: what the user asks for is not among the candidates, or there are none.
Result<ChosenOrder> choose_order(const std::vector<CacheOrder>& supported, bool declared,
                                 const NamedCacheSpecs& specs,
                                 const std::optional<std::string>& asked,
                                 std::optional<CacheOrder> connector);

}  // namespace lockstep
