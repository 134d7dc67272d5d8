// Defects of real engines in deriving views and addresses, each switchable by name: steps of
// views/views.h done differently. Sources: the catalogue in docs/planner.md.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "base/names.h"
#include "base/result.h"
#include "cuda_backend/views/views.h"

namespace lockstep::cuda {

// What an engine tells its users and its kernels about a plan: how many tokens it holds, how many
// rows a buffer indexed by slots has, how many requests run at once. Worked out on its own; the
// reference's figures are in reference/plan/capacity.h.

struct RequestLimits {
  std::int64_t max_model_len = 0;
  std::int64_t max_num_batched_tokens = 0;
  std::int64_t context_ranks = 1;  // dcp * pcp
  std::int64_t max_num_seqs = 1;
};

struct EngineCapacity {
  std::int64_t capacity_tokens = 0;
  std::int64_t slot_buffer_rows = 0;  // of a buffer with a row for each slot of any group
  std::int64_t max_num_seqs = 0;      // that will run
  std::int64_t hit_step_tokens = 0;   // hits end at its multiples; 0: none ever
};

// Refused: more requests than there are state blocks.
Result<EngineCapacity> engine_capacity(const KVCacheConfig& plan, const RequestLimits& limits);

// One bit each, so that an engine with several can be modelled (kSecondRunner).
enum class ViewDefect : std::uint32_t {
  none = 0,
  layout_two_blocks = 1u << 0,       // vLLM 37236: pair-first wherever shape[0] is 2
  ambiguous_refused = 1u << 1,       // vLLM 0.22.1, model runner V2: shape (2, 2, ...) refused
  layout_not_updated = 1u << 2,      // 38081: pair-first although states share the pages
  layout_restride_hidden = 1u << 3,  // 0.22.1, runner V2: rows re-strided as if they were pairs
  state_spec_unhandled = 1u << 4,    // 38041: no view for states
  state_stride_unpadded = 1u << 5,   // 38081 review: states strided by the real page
  state_offset_wrong_itemsize = 1u << 6,  // 38081 review: an offset in items of the state before
  kernel_block_unsplit = 1u << 7,         // 38081: the manager's block given to the kernel whole
  kernel_block_num_blocks = 1u << 8,      // 38081: num_blocks not multiplied by the split
  pack_stride = 1u << 9,       // 35703 review: strides of (num_blocks, 2) on a (2, num_blocks) view
  pack_offset = 1u << 10,      // 35703: every layer of the pack at offset 0
  pack_num_blocks = 1u << 11,  // 35703: the page of one layer counted once
  layout_equal_page = 1u << 12,   // 41657: a tensor's layers all shaped like its first one
  layout_two_heads = 1u << 13,    // LMCache 4467: the pair looked for by its size, from the right
  offset_int32 = 1u << 14,        // vLLM 1486, 1514, 50427: block times stride in 32 bits
  order_layer_stride = 1u << 15,  // an overlaid cache: layers one row of tokens too close
  order_head_stride = 1u << 16,   // ... heads one row of content too close
  mapped_dense = 1u << 17,  // vllm 0.33.0: kernel blocks of a packed block counted as if dense
};

constexpr ViewDefect operator|(ViewDefect a, ViewDefect b) {
  return static_cast<ViewDefect>(static_cast<std::uint32_t>(a) | static_cast<std::uint32_t>(b));
}
constexpr bool has(ViewDefect set, ViewDefect one) {
  return (static_cast<std::uint32_t>(set) & static_cast<std::uint32_t>(one)) != 0;
}

// The defects of vLLM 0.22.1's model runner V2.
inline constexpr ViewDefect kSecondRunner = ViewDefect::layout_two_blocks |
                                            ViewDefect::ambiguous_refused |
                                            ViewDefect::layout_restride_hidden;

// "layout-two-blocks", ...
std::string_view name_of(ViewDefect defect);
std::optional<ViewDefect> view_defect_from_name(std::string_view name);

// As derive_views() and view_byte_offset() of an engine with the defect. Refused: what the
// defective engine refuses, and defects of the other kind of layout, overlaid or not.
Result<PoolViews> planted_views(const KVCacheConfig& plan, const ViewOptions& options,
                                ViewDefect defect);
std::int64_t planted_byte_offset(const TensorView& view, std::span<const std::int64_t> index,
                                 ViewDefect defect);

// Mistakes of real engines in the figures of views/views_capacity.h, each switchable by name: wrong
// limits or a wrong plan as input, wrong figures as output.
enum class CapacityDefect : std::uint8_t {
  none,
  capacity_all_groups,  // vLLM 40384: groups of O(1) cost divide the capacity
  capacity_sliding,     // 40417: windows and chunks divide it
  routed_buffer,        // 37118: a slot-indexed buffer sized by the capacity
  state_blocks_capped,  // 38270: max_num_seqs lowered in silence to what the states allow
  cp_memory,            // 39949 review: ranks that share a context left out of the estimate
  hit_rate_pack,        // 35703: a pack's page treated as a longer block, which hits must fill
};

}  // namespace lockstep::cuda

template <>
inline constexpr char lockstep::kWordJoint<lockstep::cuda::CapacityDefect> = '-';

namespace lockstep::cuda {

// As engine_capacity() of an engine with the defect.
Result<EngineCapacity> planted_capacity(const KVCacheConfig& plan, const RequestLimits& limits,
                                        CapacityDefect defect);

}  // namespace lockstep::cuda
