// The plan of a model in a release whose groups overlay one allocation (reference/placement/), from
// what its layers keep, and the groups of that plan as a replay takes them.
//
// 1. Every stage is the engine's: block sizes of platform and backends, order, groups (unlike pages
//    side by side with blocks outermost), bytes per block, kernel blocks and tables.
// 2. A refusal says whose it is: the engine core's, with its stage, or that of a worker which dies
//    of a plan that the core has accepted.
// 3. With HiSparse (PlanOptions::hisparse_host_bytes) a layer that has an indexer of its own leads
//    those behind it that have none.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/result.h"
#include "reference/placement/memory_plan.h"
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

// The plan of a model as a server of `release` makes it: in mode align with the states that prefills
// export. `extra`: layers of no model, placed last.
Result<ModelPlacement> place_served_model(const ModelSpec& model, const PlanOptions& options,
                                          std::string_view release, const std::string& order,
                                          const LayerSpecs& extra = {});

// The groups of one worker in the types of a replay. `layers`: those that the plan was made of. A
// group of uniform type whose layers are alike is one of a single spec. The plan has no tensors:
// placed_layout.h tells them. An Error: a format of rows that the release does not have.
Result<KVCacheConfig> replay_plan(const Placement& placement, const LayerSpecs& layers);

// Layers of compressed rows whose kernels take a part of the manager's block, by name, and the
// tokens that they take: their tables are mapped (reference/placement/worker_pages.h).
// Not here: blocks that no kernel size divides, which a replay takes whole.
std::map<std::string, std::int64_t> mapped_kernel_blocks(const KVCacheConfig& plan,
                                                         AttentionBackend chosen);

// Whether pages of unlike sizes lie side by side in a block.
bool has_unlike_pages(const KVCacheConfig& plan);

}  // namespace lockstep
