// The numbers of the protocol (sim/protocol/backend.h, rules 1 to 6) on the host, for backends with
// kernels of their own. No address is worked out here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "reference/types/kv_cache_spec.h"

namespace lockstep::cuda {

std::uint64_t mix(std::uint64_t x);

// shape() of rule (1): which bits of a word stay, and which are set.
struct ShapeMasks {
  std::uint64_t keep, set;
};
ShapeMasks shape_masks(DType dtype);

// Rule (1): fills a row of K (0), V (1) or Q (2).
void fill_row(std::uint64_t content, std::int32_t layer, std::uint32_t part, std::uint32_t head,
              DType dtype, std::span<std::byte> row);

// Rule (2): a state of a layer after these contents, from what it was; `part` of those that tensor
// parallelism cuts it into.
void advance_state(std::span<const std::uint64_t> contents, std::int32_t layer, std::int32_t index,
                   std::int32_t part, std::span<std::byte> state);

// Rule (3), of a whole page: {a, b}.
struct PageSums {
  std::uint64_t a = 0;
  std::uint64_t b = 0;
};
PageSums page_sums(std::span<const std::byte> page);

// Rule (4): what one row adds to a digest.
std::uint64_t row_digest(std::span<const std::byte> row, std::int64_t position, std::uint32_t part,
                         std::uint32_t head);

// Rule (6): bytes [first, first + bytes.size()) of a page's poison.
void fill_poison(std::uint64_t kind, std::int32_t tensor, std::int64_t page, std::int64_t first,
                 std::span<std::byte> bytes);

}  // namespace lockstep::cuda
