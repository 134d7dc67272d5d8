// Where the elements of a layer's tensors lie inside their raw buffer: plain types. The reference
// fills them in closed form, the backend by the engine's own steps; the two derivations share
// nothing else.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "reference/types/kv_cache_spec.h"

namespace lockstep {

// The order of tokens and heads in a page (NHD, HND), or that of [layers, blocks, heads, tokens,
// content] in one allocation that all groups overlay, outermost first.
enum class CacheLayout : std::uint8_t { NHD, HND, LBNHC, LBHNC, LHBNC, BLNHC, BLHNC, BHLNC };
inline constexpr std::array kOverlaidLayouts = {CacheLayout::LBNHC, CacheLayout::LBHNC,
                                                CacheLayout::LHBNC, CacheLayout::BLNHC,
                                                CacheLayout::BLHNC, CacheLayout::BHLNC};
constexpr bool is_overlaid(CacheLayout layout) { return layout >= CacheLayout::LBNHC; }
// Rows of words, whatever the format of their elements, or of real numbers: rules (1) and (13) of
// sim/protocol/backend.h.
enum class Numbers : std::uint8_t { words, real };
// How the kernels are run on the CPU.
enum class CheckMode : std::uint8_t {
  fast,   // only the kernels
  check,  // every access of every simulated thread: bounds, alignment, uninitialised reads, races
  hunt,   // check, with seeded preemption between accesses
};
// The attention backend that reads a layer's cache. flashmla takes MLA rows in blocks of 64 tokens;
// cache_only writes rows and reads nothing back (hidden states). any_size takes blocks of every
// size, as the base class of vLLM's backends says and none of its attention kernels does
// (v1/attention/backend.py, get_supported_kernel_block_sizes); its layout is triton_attn's.
enum class AttentionBackend : std::uint8_t {
  flash_attn,
  flashinfer,
  triton_attn,
  triton_mla,
  flashmla,
  cache_only,
  any_size,
};

// Where K and V of one block lie when a backend's own shape puts the pair first, (2, num_blocks,
// ...). vllm_0_22_1: together in the page only when attention and state layers are in one model.
// isolated:    together in the page whenever a tensor is shared with a cache of whole pages
// (states,
//              hidden states, MLA rows): what isolation of blocks needs. Where the two differ,
//              0.22.1
//              lets a K write reach another block's page (sliding window + hidden states).
enum class LayoutRule : std::uint8_t { isolated, vllm_0_22_1 };

// A strided view. shape and stride in elements, one entry a dimension; storage_offset in elements.
struct TensorView {
  DType dtype = DType::bf16;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> stride;
  std::int64_t storage_offset = 0;
  bool operator==(const TensorView&) const = default;
};

// The views of one layer as a backend made them, and which dimension means what. A token cache has
// one view: [kernel blocks, tokens of a kernel block, ...] with the pair and the heads where the
// backend puts them; -1 where it has none. A state cache has one view a state tensor: [num_blocks,
// dims...].
struct LayerViews {
  std::vector<TensorView> tensors;
  std::int32_t block_dim = 0;
  std::int32_t kv_dim = -1;
  std::int32_t token_dim = -1;
  std::int32_t head_dim = -1;
  std::int64_t kernel_block_size = 0;  // tokens stored in one kernel block; 0: states
  std::int64_t blocks_per_kv_block = 1;
  // Kernel block j of block b is b * kernel_block_stride + j; 0: blocks_per_kv_block. Rows of a
  // packed block are mapped so, and other layers' pages lie in between.
  std::int64_t kernel_block_stride = 0;
  bool operator==(const LayerViews&) const = default;
};

inline std::int64_t kernel_block_stride(const LayerViews& views) {
  return views.kernel_block_stride != 0 ? views.kernel_block_stride : views.blocks_per_kv_block;
}

// Every layer of a plan, and the raw buffers as the backend allocated them.
struct PoolViews {
  std::vector<std::int64_t> tensor_size_bytes;
  std::vector<std::int64_t>
      kernel_block_sizes;  // per group with a cache, as the engine reports them
  std::vector<std::vector<LayerViews>> groups;  // [group][layer of the group]
};

}  // namespace lockstep
