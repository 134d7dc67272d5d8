// Recorded memory plans of an engine whose groups overlay one allocation (layouts.jsonl, format 2):
// the inputs of each line. The results stay JSON; the README of the recordings describes the
// format.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/result.h"
#include "reference/placement/placement.h"

namespace lockstep {

struct PlacementRecording {
  std::int64_t line = 0;
  std::string model;
  std::string engine;   // its version
  std::string backend;  // of the model; "by layer": bare layers without a model
  PlacementOptions options;
  std::vector<KVCacheSpec> specs;  // the distinct ones, as the planner gets them
  std::vector<PlacementLayer> layers;
  std::vector<std::pair<std::string, std::string>> shared;  // layer, whose cache it reads
  std::vector<WorkerShare> workers;                         // at least one
  std::string json;                                         // the whole line
};

// Whether the file's first line says format 2. A file that cannot be read is not.
bool is_placement_recording(const std::string& path);
// "FILE:LINE: ..." where a line is not such a plan.
Result<std::vector<PlacementRecording>> read_placement_recordings(const std::string& path);

// The engine's key for the bytes of a page of hot rows.
inline constexpr const char* kHotPageKey =
    "page_"
    "size";

// The words that torch has for element types.
std::string_view torch_name_of(DType dtype);

}  // namespace lockstep
