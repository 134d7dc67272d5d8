// The plan of a model in a release whose groups overlay one allocation (reference/placement/), from
// the specs of its layers, and the groups of that plan as a replay takes them.
//
// 1. Every stage is the engine's: block sizes of platform and backends, layout, groups (different
//    pages next to each other in a block-outer layout), bytes per block, kernel blocks and tables.
// 2. A refusal names its source: the engine core, with its stage, or a worker that crashes on a
//    plan that the core has accepted.
// 3. With host pages (PlanOptions::host_pool_bytes) a layer with its own indexer leads the
//    following layers without one.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/result.h"
#include "reference/placement/placement.h"
#include "reference/placement/worker_pages.h"
#include "reference/plan/layout.h"
#include "reference/plan/model_spec.h"
#include "reference/types/plan_options.h"

namespace lockstep {

struct ModelPlacement {
  PlacementOptions options;
  PlacementStages stages;          // a worker for each pipeline stage
  std::vector<WorkerPages> pages;  // of each of them
};

// `order`: asked for; empty, or NHD: the engine chooses. The layers are those of one rank, sizes
// open. Refused: rule 2, and --attn-pack.
Result<ModelPlacement> place_model(const LayerSpecs& layers, DType model_dtype,
                                   const PlanOptions& options, const std::string& order);

// The plan of a model as a server of `release` makes it: in mode align with the states that
// prefills export. `extra`: layers of no model, placed last.
Result<ModelPlacement> place_served_model(const ModelSpec& model, const PlanOptions& options,
                                          std::string_view release, const std::string& order,
                                          const LayerSpecs& extra = {});

// The groups of one worker in the types of a replay. `layers`: those that the plan was made of. A
// group of uniform type with equal layers becomes a group of one spec. The plan has no tensors:
// with_placed_tensors() adds them. An Error: a row format that the release does not have.
Result<KVCacheConfig> replay_plan(const Placement& placement, const LayerSpecs& layers);

// Layers of compressed rows whose kernels take a part of the manager's block, by name, and the
// tokens that they take: their tables are mapped (reference/placement/worker_pages.h).
// Not here: blocks that no kernel size divides, which a replay takes whole.
std::map<std::string, std::int64_t> mapped_kernel_blocks(const KVCacheConfig& plan,
                                                         AttentionBackend chosen);

// True if pages of different sizes are next to each other in a block.
bool has_unlike_pages(const KVCacheConfig& plan);

// The memory when all groups overlay one allocation (reference/placement/), in one of the six
// layouts of [layers, blocks, heads, tokens, content].
//
// 1. The groups, block sizes and padded pages are those of the plan. Kernel blocks equal blocks
//    where every kernel of the group takes them, otherwise the largest listed size; states in fp32
//    restrict no group, as before.
// 2. The allocation is described as consecutive tensors, each with one page per block, back to
//    back. A block-outer layout has one tensor, whose page is the whole block; a layer-outer layout
//    one per layer; LHBNC one per head slot of a layer.
// 3. K and V of a token and head are adjacent; with nvfp4 they are in separate head slots.

// Tokens of a kernel block of each group. An Error: no kernel takes a block, or a part of it.
Result<std::vector<std::int64_t>> placed_kernel_sizes(const KVCacheConfig& plan,
                                                      AttentionBackend chosen);

// The backend that alone reads rows of a format in this plan (nvfp4: FlashInfer; scales of a token
// and head: Triton; rows of a sparse MLA: FlashMLA); nothing: several do.
std::optional<AttentionBackend> only_reader(const LayerSpecs& layers);

// Refused: what an engine with these orders refuses in its core or its worker, and plans that it
// could not make (several layers packed in one page).
// REQUIRES: is_overlaid(order).
Result<MemoryPlan> placed_layout(const KVCacheConfig& plan, AttentionBackend chosen,
                                 CacheLayout order);

// The engine's layout: `asked` is NHD if the user sets none, and the engine then chooses; HND is
// the old name of LBHNC. Errors: a layout outside the candidates, or no candidate.
Result<CacheLayout> placed_order(const KVCacheConfig& plan, CacheLayout asked);

// The plan with its allocation described in the tensors of rule 2.
KVCacheConfig with_placed_tensors(KVCacheConfig plan, const MemoryPlan& placed);

// The same of a placement and its worker's pages, in one tensor: addresses by the closed form of
// the order, sizes of pages by the worker. Rows of K and V are one part.
MemoryPlan memory_plan(const Placement& plan, const WorkerPages& pages);

// Either layout: placed_layout(), or pool_layout() of a plan with one tensor per layer of a group.
Result<MemoryPlan> layout_of(const KVCacheConfig& plan, AttentionBackend chosen, CacheLayout layout,
                             LayoutRule rule);

// The plan with the tensors of its layout, which only an allocation has to work out.
Result<KVCacheConfig> with_own_tensors(KVCacheConfig plan, AttentionBackend chosen,
                                       CacheLayout layout);

}  // namespace lockstep
