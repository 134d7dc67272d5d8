// Views of a layer's tensors in their raw buffer: plain types. The reference fills them in closed
// form, the backend by the engine's own steps. The two derivations share only these types, so an
// error in one shows as a difference.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "reference/types/kv_cache_spec.h"

namespace lockstep {

// NHD and HND: the order of tokens (N) and heads (H) in a page, for plans of one buffer per tensor.
// The other six order [layers, blocks, heads, tokens, content] in one allocation that all groups
// overlay, outermost dimension first (vLLM 0.33.0, v1/kv_cache_layout.py). "LBHNC" stores a head's
// tokens back to back, "LBNHC" a token's heads.
enum class CacheLayout : std::uint8_t { NHD, HND, LBNHC, LBHNC, LHBNC, BLNHC, BLHNC, BHLNC };
inline constexpr std::array kOverlaidLayouts = {CacheLayout::LBNHC, CacheLayout::LBHNC,
                                                CacheLayout::LHBNC, CacheLayout::BLNHC,
                                                CacheLayout::BLHNC, CacheLayout::BHLNC};
constexpr bool is_overlaid(CacheLayout layout) { return layout >= CacheLayout::LBNHC; }
// The elements of rows: raw words in any format, or real numbers that attention can be computed
// from. Rules (1) and (13) of sim/protocol/backend.h.
enum class Numbers : std::uint8_t { words, real };
// Checks of the CPU executor while it runs kernels, at increasing cost.
enum class CheckMode : std::uint8_t {
  fast,   // only the kernels
  check,  // every access of every simulated thread: bounds, alignment, uninitialised reads, races
  hunt,   // check, with seeded preemption between accesses
};
// The attention backend that reads a layer's cache; it decides shape, stride order and kernel block
// sizes. flashmla takes MLA rows in blocks of 64 tokens. cache_only writes rows and reads nothing
// back (hidden states). any_size takes every block size, as the base class of vLLM's backends
// declares (v1/attention/backend.py, get_supported_kernel_block_sizes); no attention kernel of vLLM
// does. Its layout is triton_attn's.
enum class AttentionBackend : std::uint8_t {
  flash_attn,
  flashinfer,
  triton_attn,
  triton_mla,
  flashmla,
  cache_only,
  any_size,
};

// Position of K and V of one block where a backend's own shape puts the pair first, (2, num_blocks,
// ...).
// - isolated: together in the page whenever the tensor is shared with a cache of whole pages
//   (states, hidden states, MLA rows). Isolation of blocks requires this.
// - vllm_0_22_1: together in the page only if the model has both attention and state layers. Where
//   the rules differ, a K write of 0.22.1 reaches another block's page, for instance with sliding
//   windows and hidden states.
enum class LayoutRule : std::uint8_t { isolated, vllm_0_22_1 };

// A strided view of a raw buffer. shape, stride and storage_offset count elements of dtype, not
// bytes; element (i, j, ...) is at storage_offset + i * stride[0] + j * stride[1] + ...
struct TensorView {
  DType dtype = DType::bf16;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> stride;
  std::int64_t storage_offset = 0;
  bool operator==(const TensorView&) const = default;
};

// The views of one layer as a backend built them, and the meaning of their dimensions; -1: the view
// has no such dimension. A token cache has one view: [kernel blocks, tokens of a kernel block,
// ...], with the K/V pair and the heads where the backend puts them. A state cache has one view per
// state tensor: [num_blocks, dims...].
struct LayerViews {
  std::vector<TensorView> tensors{};
  std::int32_t block_dim = 0;
  std::int32_t kv_dim = -1;
  std::int32_t token_dim = -1;
  std::int32_t head_dim = -1;
  std::int64_t kernel_block_size = 0;  // tokens per kernel block; 0: states
  std::int64_t blocks_per_kv_block = 1;
  // Kernel block j of block b has the id b * kernel_block_stride + j; 0: blocks_per_kv_block. A
  // larger stride skips the pages of other layers in a packed block.
  std::int64_t kernel_block_stride = 0;
  bool operator==(const LayerViews&) const = default;
};

// Resolves the default: kernel blocks of consecutive blocks are consecutive.
inline std::int64_t kernel_block_stride(const LayerViews& views) {
  return views.kernel_block_stride != 0 ? views.kernel_block_stride : views.blocks_per_kv_block;
}

// The views of every layer of a plan, and the raw buffers as the backend allocated them.
struct PoolViews {
  std::vector<std::int64_t> tensor_size_bytes;
  std::vector<std::int64_t>
      kernel_block_sizes;  // per group with a cache, as the engine reports them
  std::vector<std::vector<LayerViews>> groups{};  // [group][layer of the group]
};

}  // namespace lockstep
