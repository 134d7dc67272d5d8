// Recorded memory plans against the model: aligned sizes, groups in order, tensors, block counts,
// concurrency to the last bit, capacity, kernel block sizes, every stride and offset, and refusals.
//
// The model receives the inputs of a line and plans from first principles: it removes aligned sizes
// from the line's layers and derives them again. A second derivation of the views (the backend's)
// can be compared in the same pass.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/result.h"
#include "reference/types/view_types.h"
#include "sim/conform/conform.h"
#include "traces/formats/layout_recording.h"

namespace lockstep {

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

// How a backend derives views for a plan with the recorded options.
using ViewSource =
    std::function<Result<PoolViews>(const KVCacheConfig&, AttentionBackend, CacheLayout)>;

// An Error: the file cannot be read or is not a recording of plans.
Result<LayoutConformance> conform_layouts(const std::string& path, const ViewSource& backend = {});

// The inputs of a recording as the model receives them: without aligned sizes.
LayerSpecs unaligned_layers(const LayoutRecording& recording);

}  // namespace lockstep
