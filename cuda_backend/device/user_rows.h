// Rows and slots as the user's kernels receive and return them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string_view>

#include "cuda_backend/device/device.h"

namespace lockstep::cuda {

// Why rows of this part are no tensor of elements; empty: they are.
inline std::string_view why_no_view(const PartLayout& part) {
  if (part.scaling == Scaling::latent_fp8_areas || part.swizzled_scales)
    return "the scales of a row are in another area of its block";
  return {};
}
// Elements of a head's row as a tensor has them.
inline std::int64_t row_width(const PartLayout& part) {
  if (part.scaling == Scaling::latent_fp8_rows) return 656;
  if (part.scaling == Scaling::latent_fp4_rows) return 352;
  return part.scaling >= kFirstPacked ? part.head_size / 2 : part.head_size;
}

// Why a token's heads are no single row of elements; empty: they are adjacent. Latent caches have
// one head, caches of hidden states may have several.
inline std::string_view why_no_row(const PartLayout& part) {
  const std::int64_t row_bytes = row_width(part) * itemsize_bytes(part.dtype);
  return part.num_heads == 1 || part.head_stride == row_bytes ? ""
                                                              : "a token's heads are not adjacent";
}

// Whether a token's slot follows from its position and the table's row. A launch without reach, as
// of an extraction, may still have rings.
inline bool gives_slots(const GroupTable& table) {
  return !table.is_encoder && !table.is_hot && !table.is_ring && !table.is_replayed;
}

// Slots of a user's map_slots, before a kernel uses them.
// Invariant: a launch with a slot outside of the pool does not run; it would access other memory.
// After the step the slots are compared, and the wrong one is reported.
class MappedSlots {
 public:
  void clear() { largest_.clear(); }
  // Keeps the slots of a table. `slots`: where they are in device memory.
  void add(const Slot* slots, std::span<const Slot> values) {
    if (!values.empty()) largest_[slots] = std::ranges::max(values);
  }
  // Sets the rows of a layer's cache, in all of its blocks.
  void set_rows(const std::byte* base, std::int64_t num_rows) { num_rows_[base] = num_rows; }
  // True if some row of these slots is outside of the layer's cache.
  bool leave_pool(const Slot* slots, const TokenRows& rows, const std::byte* base) const {
    const auto largest = largest_.find(slots);
    const auto num_rows = num_rows_.find(base);
    if (largest == largest_.end() || num_rows == num_rows_.end()) return false;
    return largest->second / rows.tokens_per_row.value >=
           num_rows->second / rows.rows_per_token.value;
  }

 private:
  std::map<const Slot*, Slot> largest_;
  std::map<const std::byte*, std::int64_t> num_rows_;
};

}  // namespace lockstep::cuda
