// The memory plan of a model under one release, for a person or a program: groups, tensors, views
// or pages, capacity and proof of every worker, as a table, JSON, a drawing of a block or a graph.
//
// Two planners fill it: one tensor per layer of a group (before 0.33.0), and groups that overlay
// one allocation (reference/placement/). What only one of them has is in `details`.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "base/result.h"
#include "reference/memory/model_placement.h"
#include "reference/plan/capacity.h"
#include "reference/plan/model_spec.h"
#include "reference/plan/planner.h"
#include "sim/check/plan_prover.h"

namespace lockstep {

// A group or a tensor, and its layers.
struct LabelledLayers {
  std::string label;
  std::vector<std::string> layers;
};

// A worker, one per pipeline stage. Without layers it has no blocks.
struct WorkerReport {
  std::int64_t num_blocks = 0, block_bytes = 0;
  double max_concurrency = 0;
  std::int64_t capacity_tokens = 0;
  std::vector<LabelledLayers> groups, tensors;
  MemoryPlan memory;  // of the same plan with three blocks
  PlanProof proof;    // of it
};

// Per worker; one without layers has empty entries.
struct TensorDetails {
  PlanOptions options;
  CacheLayout layout = CacheLayout::NHD;
  TensorPlan plan;
  std::vector<MemoryPlan> pools;
  std::vector<PoolViews> views;
  std::vector<Capacity> capacity;
};

using PlanDetails = std::variant<TensorDetails, ModelPlacement>;

struct PlanReport {
  std::string model, engine;
  std::int64_t max_model_len = 0, memory_bytes = 0;
  AlignedSizes aligned;
  std::int64_t hit_step_tokens = 0;  // prefix hits are multiples of it; 0: nothing is hit
  std::int64_t replayed_tokens = 0;  // of a hit, computed again (bounded replay)
  std::vector<WorkerReport> workers;
  std::vector<std::string> warnings;
  PlanDetails details;
};

// `engine`: the release. `layout`: NHD or HND, or an order of the cache (empty or
// NHD: the engine chooses). `extra` layers follow the model's own (hidden states). Refused: what
// the engine's core or its worker refuses.
Result<PlanReport> make_plan_report(const ModelSpec& model, const PlanOptions& options,
                                    const std::string& engine, const std::string& layout,
                                    const LayerSpecs& extra = {});

// The plan in lines of about 110 columns.
std::string plan_table(const PlanReport& report);

// One JSON object (docs/planner.md lists the keys of both planners).
std::string plan_to_json(const PlanReport& report);

// A block to scale, once for each way in which a group's layers fill it.
std::string plan_map(const PlanReport& report);
// The same as a picture: every run of bytes with its layer.
std::string plan_svg(const PlanReport& report);

// The graph of groups, layers and tensors, in the DOT language.
std::string plan_dot(const PlanReport& report);

}  // namespace lockstep
