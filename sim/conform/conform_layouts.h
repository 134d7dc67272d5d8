// Recorded memory plans compared with the model: aligned sizes, groups in order, tensors, block
// counts, concurrency to the last bit, capacity, kernel block sizes, every stride and offset, and
// refusals.
//
// The model receives the inputs of a line and plans from first principles: it removes aligned sizes
// from the line's layers and derives them again. The same pass can compare a second derivation of
// the views (the backend's).
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/result.h"
#include "reference/placement/placement.h"
#include "reference/types/view_types.h"
#include "sim/conform/conform.h"
#include "traces/formats/plan_recording.h"

namespace lockstep {

// The model's plan of a recorded plan's inputs, in the recording's own terms: JSON that is compared
// value by value with the engine's.

// The recorded results without what the model is not compared with: inputs, and what model runner
// V2 of 0.22.1 builds wrongly (a planted defect reproduces it).
nlohmann::json compared_results(const PlanRecording& recording);

// The stages that a recording holds; `recorded` names the layers and pools to describe. A refusal
// is "refused".
nlohmann::json plan_record(const PlanRecording& recording, const nlohmann::json& recorded);

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

struct LayoutMismatch {
  ConformMismatch mismatch;  // step is the line, counted from 1
  std::string model;         // the model of that line
};

struct LayoutConformance {
  std::string file;
  std::int64_t plans = 0;
  std::int64_t agreed = 0;
  std::int64_t views = 0;                  // compared, each derivation counted
  std::vector<LayoutMismatch> mismatches;  // the first of each plan that disagrees
};

// An Error: the file cannot be read or is not a recording of plans.
Result<LayoutConformance> conform_layouts(const std::string& path, const ViewSource& backend = {});

}  // namespace lockstep
