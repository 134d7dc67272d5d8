// Recorded memory plans of an engine (layouts.jsonl): the inputs of each line. The results stay
// JSON, in `json`; the README of the recordings describes both formats.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "base/result.h"
#include "reference/placement/placement.h"
#include "reference/types/plan_options.h"

namespace lockstep {

// Format 1, releases with one tensor per layer. The engine has already aligned the block sizes.
struct TensorPlanInputs {
  PlanOptions options;
  LayerSpecs layers;
};

// Format 2, releases whose groups overlay one allocation.
struct OverlaidPlanInputs {
  std::string backend;  // of the model; "by layer": bare layers without a model
  PlacementOptions options;
  std::vector<KVCacheSpec> specs;  // the distinct ones, as the planner receives them
  std::vector<PlacementLayer> layers;
  std::vector<WorkerShare> workers;  // at least one
};

struct PlanRecording {
  std::int64_t line = 0;
  std::string model;
  std::variant<TensorPlanInputs, OverlaidPlanInputs> inputs;
  std::string json;  // the whole line
};

// "FILE:LINE: ..." where a line does not hold the inputs of a plan.
Result<std::vector<PlanRecording>> read_plan_recordings(const std::string& path);

// A spec as a plan has it, without what follows from the rest (sizes in bytes).
std::string planned_spec_json(const KVCacheSpec& spec);

// The engine's key for the bytes of a page of hot rows.
inline constexpr const char* kHotPageKey =
    "page_"
    "size";

// The words that torch has for element types.
std::string_view torch_name_of(DType dtype);

}  // namespace lockstep
