// From the facts of a layer to the spec that the planner receives: the platform's block sizes, then
// each backend's packing of rows, quantization and strides.
//
// Facts of a layer are its type, heads, head sizes, window, chunk, states, tokens per row and
// reader; everything else of its spec is derived here. Sources: vllm/platforms/interface.py
// (update_block_size_for_backend), customize_spec of each backend, get_kv_cache_spec of each kind
// of layer.
#pragma once

#include <optional>
#include <vector>

#include "base/result.h"
#include "reference/placement/placement.h"

namespace lockstep {

struct BlockAlignment {
  std::int64_t block_size = 0;        // tokens
  std::int64_t mamba_block_size = 0;  // of states; max_model_len when they are not cached
  std::optional<std::int64_t> mamba_page_size_padded;
  std::optional<std::int64_t> skip_page_size_padded;  // shared by quantized and unquantized layers
};

// Takes away what is worked out here.
void forget_plan(KVCacheSpec& spec);
// The layer without it.
PlacementLayer layer_facts(const PlacementLayer& layer);

// An Error: backends that share no block size, or an aligned one that a backend does not take.
Result<BlockAlignment> align_blocks(const std::vector<PlacementLayer>& facts,
                                    const PlacementOptions& options);

// The layers with their specs, those of host pages among them.
Result<std::vector<PlacementLayer>> layers_with_specs(const std::vector<PlacementLayer>& facts,
                                                      const BlockAlignment& alignment,
                                                      const PlacementOptions& options);

// The backend's packing: bytes of a row, head slots, strides between blocks.
KVCacheSpec customized(const CacheBackend& backend, DeviceFamily device, KVCacheSpec spec);

// What a cache of this name holds.
struct CacheFormat {
  DType dtype = DType::bf16;
  KVQuantMode mode = KVQuantMode::none;
};
CacheFormat cache_format(std::string_view kv_dtype, DType model_dtype);

}  // namespace lockstep
