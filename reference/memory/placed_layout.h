// Positions of elements when all groups overlay one allocation (reference/placement/): the closed
// form of layout.h for the six layouts of [layers, blocks, heads, tokens, content].
//
// 1. The groups, block sizes and padded pages are those of the plan. Kernel blocks equal blocks
//    where every kernel of the group takes them, otherwise the largest listed size; states in fp32
//    restrict no group, as before.
// 2. The allocation is described as consecutive tensors, each with one page per block, back to
//    back. A block-outer layout has one tensor, whose page is the whole block; a layer-outer layout
//    one per layer; LHBNC one per head slot of a layer.
// 3. K and V of a token and head are adjacent; with nvfp4 they are in separate head slots.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/result.h"
#include "reference/plan/layout.h"
#include "reference/types/plan_options.h"

namespace lockstep {

// Tokens of a kernel block of each group. An Error: no kernel takes a block, or a part of it.
Result<std::vector<std::int64_t>> placed_kernel_sizes(const KVCacheConfig& plan,
                                                      AttentionBackend chosen);

// The backend that alone reads rows of a format in this plan (nvfp4: FlashInfer; scales of a token
// and head: Triton; rows of a sparse MLA: FlashMLA); nothing: several do.
std::optional<AttentionBackend> only_reader(const LayerSpecs& layers);

// Refused: what an engine with these orders refuses in its core or its worker, and plans that it
// could not make (several layers packed in one page).
// REQUIRES: is_overlaid(order).
Result<PoolLayout> placed_layout(const KVCacheConfig& plan, AttentionBackend chosen,
                                 CacheLayout order);

// The engine's layout: `asked` is NHD if the user sets none, and the engine then chooses; HND is
// the old name of LBHNC. Errors: a layout outside the candidates, or no candidate.
Result<CacheLayout> placed_order(const KVCacheConfig& plan, CacheLayout asked);

// The plan with its allocation described in the tensors of rule 2.
KVCacheConfig with_placed_tensors(KVCacheConfig plan, const PoolLayout& placed);

// Either layout: placed_layout(), or pool_layout() of a plan with one tensor per layer of a group.
Result<PoolLayout> layout_of(const KVCacheConfig& plan, AttentionBackend chosen, CacheLayout layout,
                             LayoutRule rule);

// The plan with the tensors of its layout, which only an allocation has to work out.
Result<KVCacheConfig> with_own_tensors(KVCacheConfig plan, AttentionBackend chosen,
                                       CacheLayout layout);

}  // namespace lockstep
