// What the model makes of a recorded plan's inputs, in the recording's own terms: JSON that is
// compared value by value with what the engine recorded.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>

#include "base/result.h"
#include "traces/formats/placement_recording.h"

namespace lockstep {

// The stages that a recording holds, `recorded` names the layers and pools that are looked at. A
// refusal is {"refused":{"stage":..,"text":..}}.
nlohmann::json placement_record(const PlacementRecording& recording,
                                const nlohmann::json& recorded);

// A spec with everything that follows from it.
nlohmann::json spec_record(const CacheSpec& spec);

}  // namespace lockstep
