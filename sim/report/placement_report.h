// The memory plan of a release whose groups overlay one allocation (reference/placement/), from a
// model file: order, groups, tensors, pages, capacity and proof, as a table and as a drawing.
//
// Layers without a place in a model file (windows of compressed rows, rings, HiSparse) are refused;
// recordings have them.
#pragma once

#include <optional>
#include <string>

#include "base/result.h"
#include "reference/placement/memory_plan.h"
#include "reference/placement/worker_pages.h"
#include "reference/plan/model_spec.h"
#include "sim/check/placement_prover.h"

namespace lockstep {

struct PlacementReport {
  std::string model, engine;
  PlacementOptions options;
  PlacementStages stages;      // of one worker
  WorkerPages pages;           // of that worker
  PlacementCapacity capacity;  // of its pool
  PlacementProof proof;        // of the same plan with three blocks
};

// `order`: asked for; empty: the engine chooses. Refused: what the engine's core or its worker
// refuses, with the stage; several pipeline stages.
Result<PlacementReport> make_placement_report(const ModelSpec& model, const PlanOptions& options,
                                              const std::string& engine, const std::string& order,
                                              const LayerSpecs& extra = {});

std::string placement_table(const PlacementReport& report);
// A block of the pool to scale, once for each group that fills it in its own way.
std::string placement_map(const PlacementReport& report);

}  // namespace lockstep
