// Defects of real engines in deriving views and addresses, each switchable by name: steps of
// views/views.h done differently. Sources: the catalogue in docs/planner.md.
#pragma once

#include <cstdint>
#include <span>

#include "base/names.h"
#include "base/result.h"
#include "cuda_backend/views/views.h"

namespace lockstep::cuda {

enum class ViewDefect : std::uint8_t {
  none,
  layout_two_blocks,            // vLLM 37236: pair-first wherever shape[0] is 2
  ambiguous_refused,            // vLLM 0.22.1, model runner V2: shape (2, 2, ...) refused
  layout_not_updated,           // 38081: pair-first although states share the pages
  layout_restride_hidden,       // 0.22.1, runner V2: rows re-strided as if they were pairs
  state_spec_unhandled,         // 38041: no view for states
  state_stride_unpadded,        // 38081 review: states strided by the real page
  state_offset_wrong_itemsize,  // 38081 review: an offset in items of the state before
  kernel_block_unsplit,         // 38081: the manager's block given to the kernel whole
  kernel_block_num_blocks,      // 38081: num_blocks not multiplied by the split
  pack_stride,         // 35703 review: strides of (num_blocks, 2) on a (2, num_blocks) view
  pack_offset,         // 35703: every layer of the pack at offset 0
  pack_num_blocks,     // 35703: the page of one layer counted once
  layout_equal_page,   // 41657: a tensor's layers all shaped like its first one
  layout_two_heads,    // LMCache 4467: the pair looked for by its size, from the right
  offset_int32,        // vLLM 1486, 1514, 50427: block times stride in 32 bits
  order_layer_stride,  // an overlaid cache: layers one row of tokens too close
  order_head_stride,   // ... heads one row of content too close
  mapped_dense,        // vllm 0.33.0: kernel blocks of a packed block counted as if dense
};

}  // namespace lockstep::cuda
template <>
inline constexpr char lockstep::kWordJoint<lockstep::cuda::ViewDefect> = '-';
namespace lockstep::cuda {

using ViewDefects = EnumSet<ViewDefect>;

// vLLM 0.22.1's model runner V2.
inline constexpr ViewDefects kSecondRunner{ViewDefect::layout_two_blocks,
                                           ViewDefect::ambiguous_refused,
                                           ViewDefect::layout_restride_hidden};

// As derive_views() and view_byte_offset() of an engine with these defects. Refused: what the
// defective engine refuses, and defects of the other kind of layout, overlaid or not.
Result<PoolViews> planted_views(const KVCacheConfig& plan, const ViewOptions& options,
                                ViewDefects defects);
std::int64_t planted_byte_offset(const TensorView& view, std::span<const std::int64_t> index,
                                 ViewDefects defects);

}  // namespace lockstep::cuda
