// What the model makes of a recorded plan's inputs, in the recording's own terms: JSON that is
// compared value by value with what the engine recorded.
#pragma once

#include <nlohmann/json.hpp>

#include "reference/placement/memory_plan.h"
#include "traces/formats/placement_recording.h"

namespace lockstep {

// The stages that a recording holds, `recorded` names the layers and pools that are looked at. A
// refusal is {"refused":{"stage":..,"text":..}}.
nlohmann::json placement_record(const PlacementRecording& recording,
                                const nlohmann::json& recorded);

// The model's plan of a recording's inputs.
PlacementStages plan_of(const PlacementRecording& recording);

// A spec with everything that follows from it.
nlohmann::json spec_record(const KVCacheSpec& spec);

}  // namespace lockstep
