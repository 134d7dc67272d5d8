// Attention packing: N full-attention layers share one page, so a block holds 1/N of the tokens
// that a page of one layer would, and prefixes hit in smaller steps; the states take N times as
// many groups.
//
// 1. page_size_bytes of an attention spec stays that of one layer; a page of the pool holds N of
//    them.
// 2. Layer i of a group lies in tensor i / N at place i % N.
// 3. The last pack may hold fewer than N layers: its free places are wasted in every block.
// Source: vLLM pull request 35703 (mamba_num_attn_pages).
#pragma once

#include <cstdint>

#include "base/result.h"
#include "reference/types/plan_options.h"

namespace lockstep {

// Layers of this kind that share a page when the option is `attn_pack`.
std::int64_t layers_per_page(const KVCacheSpec& spec, std::int64_t attn_pack);

// Packs (or single layers) that the layers of one kind make, and the layers of pack `unit` appended
// to a group. Requires layers of equal spec.
std::int64_t num_units(const LayerSpecs& layers_of_kind, std::int64_t attn_pack);
void append_unit(const LayerSpecs& layers_of_kind, std::int64_t unit, KVCacheGroupSpec& group);

// Places that stand empty in the last pack of the group; each wastes one layer's page a block.
std::int64_t empty_places(const KVCacheGroupSpec& group);

// Refused: packing without states, or more layers to a page than the model has attention layers.
Result<bool> check_packable(const LayerSpecs& layers, std::int64_t attn_pack);

// Refused: pages that are not one pool page each once attention is packed.
Result<LayerSpecs> with_packed_pages(const LayerSpecs& layers, std::int64_t attn_pack);

}  // namespace lockstep
