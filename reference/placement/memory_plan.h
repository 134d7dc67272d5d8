// All stages of a plan in the engine's order, each kept; a refusal names its stage and leaves the
// later ones empty.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "reference/placement/layer_specs.h"
#include "reference/placement/placement.h"

namespace lockstep {

struct PlacementStages {
  std::optional<BlockAlignment> alignment;
  std::vector<PlacementLayer> layers;  // with the specs that the planner gets
  std::vector<CacheLayout> supported;
  std::optional<ChosenOrder> order;
  std::vector<PlacedGroup> groups;
  std::vector<Placement> workers;  // empty: refused
  std::string_view refused_stage;  // options, specs, layout, groups, plan; empty: planned
  Error refused;
};

// A connector's preferred layout: by its name, where the layers allow it.
std::optional<CacheLayout> order_wish(const std::vector<PlacementLayer>& layers,
                                      const PlacementOptions& options);

// `layers` are facts of a model's layers; `is_bare`: layers without a model, whose specs stand as
// they are.
PlacementStages plan_stages(const std::vector<PlacementLayer>& layers, bool is_bare,
                            const std::vector<WorkerShare>& workers,
                            const PlacementOptions& options);

}  // namespace lockstep
