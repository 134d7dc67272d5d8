// The views of a plan as an engine makes them: it asks each backend for a shape and an order, looks
// at the raw buffer through them, pads, re-strides, slices. Nothing here knows the reference's
// closed form (reference/plan/layout.h); that both address the same bytes the prover has to show.
//
// 1. Offsets and strides are in elements of the view's dtype and in 64 bits.
// 2. Every layer of a plan gets its views, or the plan is refused with a reason.
// 3. The block dimension is asked from the backend, never guessed from a size of 2.
// Not checked here: that a view stays inside its buffer and its pages (sim/check/layout_prover.h).
// Steps: _reshape_kv_cache_tensors and _update_hybrid_attention_mamba_layout of vLLM 0.22.1's
// gpu_model_runner.py; packing: vLLM pull request 35703.
#pragma once

#include <cstdint>
#include <span>

#include "base/result.h"
#include "reference/types/kv_cache_spec.h"
#include "reference/types/view_types.h"

namespace lockstep::cuda {

struct ViewOptions {
  AttentionBackend backend = AttentionBackend::flash_attn;
  CacheLayout layout = CacheLayout::NHD;
  LayoutRule rule = LayoutRule::isolated;
};

// Refused: no kernel takes a part of a block; a page that a view cannot stride over; K and V rows
// of different lengths.
Result<PoolViews> derive_views(const KVCacheConfig& plan, const ViewOptions& options);

// What one block of a layer takes of its buffer: its shape's bytes, or the padded page.
std::int64_t page_bytes(const KVCacheSpec& spec, AttentionBackend chosen);

// Byte offset in the raw buffer of the element at `index`, one entry a dimension of the view.
std::int64_t view_byte_offset(const TensorView& view, std::span<const std::int64_t> index);

}  // namespace lockstep::cuda
