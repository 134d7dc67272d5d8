// Everything that is worked out about a plan, gathered for a person or a program: plan, layouts,
// views, capacity of every worker, as a table, JSON, a drawing of a page or a graph.
#pragma once

#include <string>
#include <vector>

#include "base/result.h"
#include "reference/plan/capacity.h"
#include "reference/plan/layout.h"
#include "reference/plan/model_spec.h"
#include "reference/plan/planner.h"
#include "reference/types/view_types.h"

namespace lockstep {

struct PlanReport {
  std::string model;
  PlanOptions options;
  CacheLayout layout = CacheLayout::NHD;
  MemoryPlan plan;
  // Per worker; a worker without layers has empty entries.
  std::vector<PoolLayout> pools;
  std::vector<PoolViews> views;
  std::vector<Capacity> capacity;
};

// `extra` layers come behind the model's own (hidden states).
Result<PlanReport> make_plan_report(const ModelSpec& model, const PlanOptions& options,
                                    CacheLayout layout, const LayerSpecs& extra = {});

// The plan in lines of about 110 columns; equal groups share one line.
std::string plan_table(const PlanReport& report);

// One JSON object: options, aligned sizes, workers with groups, tensors, layouts, views, capacity.
std::string plan_to_json(const PlanReport& report);

// The pages of worker 0 to scale: one bar for each way in which a group's layers fill a page.
std::string plan_map(const PlanReport& report);
// The same as a picture.
std::string plan_svg(const PlanReport& report);

// The graph of groups, layers and tensors of worker 0, in the DOT language.
std::string plan_dot(const PlanReport& report);

}  // namespace lockstep
