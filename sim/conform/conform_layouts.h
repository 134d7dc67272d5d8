// Recorded memory plans compared with the model: aligned sizes, groups in order, tensors, block
// counts, concurrency to the last bit, capacity, kernel block sizes, every stride and offset, and
// refusals.
//
// The model receives the inputs of a line and plans from first principles: it removes aligned sizes
// from the line's layers and derives them again. The same pass can compare a second derivation of
// the views (the backend's).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/result.h"
#include "sim/conform/conform.h"
#include "sim/conform/plan_record.h"

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

// An Error: the file cannot be read or is not a recording of plans.
Result<LayoutConformance> conform_layouts(const std::string& path, const ViewSource& backend = {});

}  // namespace lockstep
