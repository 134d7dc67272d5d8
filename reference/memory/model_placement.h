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
#include <string>
#include <vector>

#include "base/result.h"
#include "reference/placement/placement.h"
#include "reference/placement/worker_pages.h"
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
// placed_layout.h adds them. An Error: a row format that the release does not have.
Result<KVCacheConfig> replay_plan(const Placement& placement, const LayerSpecs& layers);

// Layers of compressed rows whose kernels take a part of the manager's block, by name, and the
// tokens that they take: their tables are mapped (reference/placement/worker_pages.h).
// Not here: blocks that no kernel size divides, which a replay takes whole.
std::map<std::string, std::int64_t> mapped_kernel_blocks(const KVCacheConfig& plan,
                                                         AttentionBackend chosen);

// True if pages of different sizes are next to each other in a block.
bool has_unlike_pages(const KVCacheConfig& plan);

}  // namespace lockstep
