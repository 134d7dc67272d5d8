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
#pragma once

#include <cstdint>
#include <optional>

#include "base/result.h"
#include "reference/types/plan_options.h"

namespace lockstep {

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

// Both attention and state layers; hidden states are neither.
bool is_hybrid(const LayerSpecs& layers);

}  // namespace lockstep
