// The model's plan of a recorded plan's inputs, in the recording's own terms: JSON that is compared
// value by value with the engine's.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>

#include "reference/placement/placement.h"
#include "reference/types/view_types.h"
#include "traces/formats/plan_recording.h"

namespace lockstep {

// The recorded results without what the model is not compared with: inputs, and what model runner
// V2 of 0.22.1 builds wrongly (a planted defect reproduces it).
nlohmann::json compared_results(const PlanRecording& recording);

// The stages that a recording holds; `recorded` names the layers and pools to describe. A refusal
// is "refused".
nlohmann::json plan_record(const PlanRecording& recording, const nlohmann::json& recorded);

// Views in a plan of one tensor per layer, of each layer that `names` has.
nlohmann::json views_record(const KVCacheConfig& pool, const PoolViews& views,
                            const nlohmann::json& names);
// A derivation of views for a plan with the recorded options.
using ViewSource =
    std::function<Result<PoolViews>(const KVCacheConfig&, AttentionBackend, CacheLayout)>;
// "views" of every recorded layout and pool, by `source`. Requires recorded["views"].
nlohmann::json pools_record(const KVCacheConfig& plan, AttentionBackend backend,
                            const nlohmann::json& recorded, const ViewSource& source);

// The inputs of a recording as the model receives them: without aligned sizes.
LayerSpecs unaligned_layers(const TensorPlanInputs& inputs);
// The model's plan of a recording's inputs.
PlacementStages plan_of(const OverlaidPlanInputs& inputs);

// A spec with everything that follows from it.
nlohmann::json spec_record(const KVCacheSpec& spec);

}  // namespace lockstep
