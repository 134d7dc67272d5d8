// Attention outputs of a case by query, assembled from all tensor and pipeline parallel ranks. A
// relation over devices: with one rank or many, the answers are the same, bit for bit.
//
// (1) A query head's arithmetic does not depend on the other heads of its rank, so rounding is
//     equal.
// (2) Every query of every step runs, whatever the case's budget.
//
// Not related: context parallel ranks, each of which answers only for its own tokens.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/result.h"
#include "properties/judge/judge.h"
#include "traces/formats/saved_case.h"

namespace lockstep {

struct OutputKey {
  std::int64_t step = 0;
  std::int32_t row = 0;
  std::string layer;
  std::int32_t query_head = 0;  // of the whole model
  std::int32_t first = 0;       // positions that were read
  std::int32_t last = 0;
  auto operator<=>(const OutputKey&) const = default;
};
using OutputsByQuery = std::map<OutputKey, std::vector<float>>;

// Errors: what engine, plan or backend refuse; a run that does not agree.
Result<OutputsByQuery> outputs_of(const SavedCase& saved, const BackendFactory& backend);

// The first output that differs between one device and the case's ranks, in one line; absent: none.
Result<std::optional<std::string>> check_rank_outputs(const SavedCase& saved,
                                                      const BackendFactory& backend);

}  // namespace lockstep
