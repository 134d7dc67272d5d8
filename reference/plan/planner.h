// From layers and memory to a plan: groups, shared tensors, and the number of blocks.
//
// 1. Tensor i is shared by the i-th layer (or pack) of every group; sizes are num_blocks pages.
// 2. num_blocks = memory // (page * tensors), or the override; the smallest worker's applies to
//    all, and the tensors of the others shrink in proportion.
// 3. A returned plan holds one request of max_model_len, and max_num_seqs states if requested.
// 4. Nothing is capped silently: what does not fit is an Error that states what would.
// Rules: vllm/v1/core/kv_cache_utils.py (get_kv_cache_configs).
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/result.h"
#include "reference/types/plan_options.h"

namespace lockstep {

// The block size of a hybrid: attention and state layers draw blocks from one pool, so a page must
// hold as many tokens as a state takes bytes.
//
// 1. block_size is a multiple of the kernel alignment, of the state chunk in mode all, and of the
//    places in mode align at which every state layer can export a state from inside a prefill.
// 2. block_size * bytes_per_token * attn_pack >= bytes of one set of states; the states are padded
//    to it.
// 3. mamba_page_size_padded is absent exactly when nothing is padded.
// 4. A model without states keeps the default block size, or the smallest that its backend takes.
// Rules: vllm/platforms/interface.py (_align_hybrid_block_size); packing: vLLM pull request 35703.

struct AlignedSizes {
  std::int64_t block_size = 0;
  std::optional<std::int64_t> mamba_block_size;        // modes align and all
  std::optional<std::int64_t> mamba_page_size_padded;  // bytes
  bool operator==(const AlignedSizes&) const = default;
};

// Refused: a block_size that the backend cannot take a part of; a hybrid whose attention layers
// disagree on the bytes of a token.
Result<AlignedSizes> aligned_sizes(const LayerSpecs& layers, const PlanOptions& options);

// The layers with the sizes put in: attention layers that left block_size open, and every state
// layer.
LayerSpecs with_aligned_sizes(LayerSpecs layers, const AlignedSizes& sizes,
                              const PlanOptions& options);

std::string gib_text(std::int64_t bytes);  // "40.00 GiB", "1.50 MiB", "300 bytes"

// Both attention and state layers; hidden states are neither.
bool is_hybrid(const LayerSpecs& layers);

struct TensorPlan {
  AlignedSizes aligned;
  LayerSpecs layers;                   // of all workers, sizes put in
  std::vector<KVCacheConfig> workers;  // one a pipeline stage; the same groups, their own layers
  std::vector<std::string> warnings;   // the plan works as the engine's, with a disadvantage
};

// The number of blocks for these groups, in place of the options'.
using PoolSize = std::function<std::int64_t(const std::vector<KVCacheGroupSpec>& groups)>;

// Aligns, then plans: a worker for each pipeline stage.
Result<TensorPlan> plan_memory(LayerSpecs layers, PlanOptions options,
                               const PoolSize& pool_size = {});

// The plan of one worker whose groups are known. Requires room for at least one block.
KVCacheConfig kv_cache_config(std::vector<KVCacheGroupSpec> groups, std::int64_t memory_bytes,
                              const PlanOptions& options);

}  // namespace lockstep
