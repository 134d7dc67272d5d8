// What attention answers, wherever it was worked out: the outputs of a case by who asked for them,
// put together from all tensor and pipeline parallel ranks. A relation over devices: one rank or
// many, the answers are the same, bit for bit.
//
// (1) A query head's arithmetic does not depend on what else its rank holds, so nothing is rounded
//     differently.
// (2) Every query of every step is asked, whatever the case's budget says.
//
// Not related: ranks of context parallelism, each of which answers for its own tokens alone.
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

// The first output that one device and the ranks of the case give differently, in one sentence;
// nothing: there is none.
Result<std::optional<std::string>> check_rank_outputs(const SavedCase& saved,
                                                      const BackendFactory& backend);

}  // namespace lockstep
