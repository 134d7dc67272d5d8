// The memory plan of a release whose groups overlay one allocation (reference/placement/), from a
// model file: order, groups, tensors, pages, capacity and proof of every pipeline stage, as a
// table, a drawing, a graph and JSON.
//
// Layers without a place in a model file (windows of compressed rows, rings) are refused;
// recordings have them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/result.h"
#include "reference/memory/model_placement.h"
#include "reference/plan/model_spec.h"
#include "sim/check/placement_prover.h"

namespace lockstep {

struct PlacementReport {
  std::string model, engine;
  ModelPlacement placed;
  // Of each worker, a pipeline stage:
  std::vector<PlacementCapacity> capacity;  // of its pool
  std::vector<PlacementProof> proofs;       // of the same plan with three blocks
  std::vector<std::string> warnings;        // under the plan
};

// Prefix hits are multiples of it; 0: nothing is hit (Capacity::hit_step_tokens).
std::int64_t hit_step_tokens(const ModelPlacement& placed);

// `order`: asked for; empty: the engine chooses. Refused: what the engine's core or its worker
// refuses (model_placement.h).
Result<PlacementReport> make_placement_report(const ModelSpec& model, const PlanOptions& options,
                                              const std::string& engine, const std::string& order,
                                              const LayerSpecs& extra = {});

std::string placement_table(const PlacementReport& report);
// A block of the pool to scale, once for each group that fills it in its own way.
std::string placement_map(const PlacementReport& report);
// The same as a picture: every run of bytes with its layer.
std::string placement_svg(const PlacementReport& report);
// The graph of groups, layers and tensors of every stage, in the DOT language.
std::string placement_dot(const PlacementReport& report);
// One JSON object: options, order, aligned sizes; stages with groups, tensors, pages, kernel
// blocks, capacity, findings (docs/planner.md lists the keys).
std::string placement_to_json(const PlacementReport& report);

// A run of bytes of one block, in the order in which they lie; with layers outermost the regions of
// a group's layers stand end to end.
struct BlockRun {
  std::int64_t begin = 0, end = 0;
  std::string layer;
  int state = -1;  // which state of a set; -1: rows of tokens
  bool operator==(const BlockRun&) const = default;
};
// Runs of the layers of one group; the bytes between them are padding or unowned.
std::vector<BlockRun> block_runs(const Placement& plan, const WorkerPages& pages,
                                 std::size_t group);

}  // namespace lockstep
