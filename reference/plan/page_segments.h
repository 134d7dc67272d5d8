// What lies where inside one block of a tensor, as runs of bytes: for drawing a page, and for
// saying how much of it is used.
//
// 1. The segments of a block cover its bytes exactly once, in ascending order.
// 2. Their places are those of layout.h's byte_offset.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "reference/plan/layout.h"

namespace lockstep {

enum class SegmentKind : std::uint8_t {
  k,            // K rows
  v,            // V rows
  row,          // MLA rows, hidden states
  state,        // one state tensor; `part` says which
  padding,      // of a page longer than its content
  empty_place,  // room of a pack that no layer fills
};

struct PageSegment {
  std::int64_t begin = 0;  // bytes from the block's first byte, its extents laid end to end
  std::int64_t end = 0;
  SegmentKind kind = SegmentKind::padding;
  std::int32_t part = 0;    // which state tensor
  std::int32_t layer = -1;  // of the group; -1: none
  bool operator==(const PageSegment&) const = default;
};

// The block of a tensor when group `group` owns it; no segments where the group has no layer there.
// Neighbouring rows of one layer and kind are one segment.
std::vector<PageSegment> page_segments(const KVCacheConfig& config, const PoolLayout& layout,
                                       std::size_t group, std::int32_t tensor);

}  // namespace lockstep
