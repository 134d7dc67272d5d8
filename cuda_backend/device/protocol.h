// The numbers of the protocol (sim/protocol/backend.h, rules 1 to 6) on the host, for backends with
// their own kernels. No address is computed here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "reference/types/kv_cache_spec.h"

namespace lockstep::cuda {

// shape() of rule (1): bits of a word to keep and bits to set.
struct ShapeMasks {
  std::uint64_t keep, set;
};
ShapeMasks shape_masks(DType dtype);

// Rule (1): fills a row of K (0), V (1) or Q (2).
void fill_row(std::uint64_t content, std::int32_t layer, std::uint32_t part, std::uint32_t head,
              DType dtype, std::span<std::byte> row);

// Rule (13): multiplies the first element of a query's row where its content asks for it.
void enlarge_query(std::uint64_t content, DType dtype, std::span<std::byte> row);

// Rule (6): bytes [first, first + bytes.size()) of a page's poison.
void fill_poison(std::uint64_t kind, std::int32_t tensor, std::int64_t page, std::int64_t first,
                 std::span<std::byte> bytes);

}  // namespace lockstep::cuda
