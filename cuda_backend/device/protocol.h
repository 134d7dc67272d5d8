// The numbers of the protocol (sim/protocol/backend.h, rules 1 to 6) on the host, for backends with
// their own kernels. No address is computed here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "reference/types/kv_cache_spec.h"

namespace lockstep::cuda {

std::uint64_t mix(std::uint64_t x);

// shape() of rule (1): bits of a word to keep and bits to set.
struct ShapeMasks {
  std::uint64_t keep, set;
};
ShapeMasks shape_masks(DType dtype);

// Rule (1): fills a row of K (0), V (1) or Q (2).
void fill_row(std::uint64_t content, std::int32_t layer, std::uint32_t part, std::uint32_t head,
              DType dtype, std::span<std::byte> row);

// Rule (2): advances a state of a layer by these contents. `part`: the tensor parallel rank's part.
void advance_state(std::span<const std::uint64_t> contents, std::int32_t layer, std::int32_t index,
                   std::int32_t part, std::span<std::byte> state);

// Rule (3): the sums {a, b} of a whole page.
struct PageSums {
  std::uint64_t a = 0;
  std::uint64_t b = 0;
};
PageSums page_sums(std::span<const std::byte> page);

// Rule (4): the term of one row in a digest.
std::uint64_t row_digest(std::span<const std::byte> row, std::int64_t position, std::uint32_t part,
                         std::uint32_t head);

// Rule (6): bytes [first, first + bytes.size()) of a page's poison.
void fill_poison(std::uint64_t kind, std::int32_t tensor, std::int64_t page, std::int64_t first,
                 std::span<std::byte> bytes);

}  // namespace lockstep::cuda
