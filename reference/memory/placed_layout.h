// Where elements lie when all groups overlay one allocation (reference/placement/): the closed form
// of layout.h for the six orders of [layers, blocks, heads, tokens, content].
//
// 1. The groups, block sizes and padded pages are those of the plan. Kernel blocks are a block
//    itself where every kernel of its group takes it, else the largest listed size; states in fp32
//    restrict nobody, as they did before.
// 2. The allocation is told in tensors that follow one another: each is one page of every block,
//    one behind the other. With blocks outermost there is one, whose page is all that a block has;
//    with layers outermost one for each layer; in order LHBNC one for each head slot of a layer.
// 3. K and V of a token and head lie side by side; of nvfp4 in head slots of their own.
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

// What the engine takes: `asked` is NHD where nobody asks for an order, which it chooses then; HND
// is its old name of LBHNC. Refused: an order that is not among the candidates, or none.
Result<CacheLayout> placed_order(const KVCacheConfig& plan, CacheLayout asked);

// The plan with its allocation told in the tensors of rule 2.
KVCacheConfig with_placed_tensors(KVCacheConfig plan, const PoolLayout& placed);

}  // namespace lockstep
