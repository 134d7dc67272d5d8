// How large a saved case is, as numbers to show and as an order to shrink by.
//
// (1) Of two cases the smaller rank is the simpler case to read; equal cases have equal ranks.
// (2) Every rank is a tuple of numbers that are not negative: a search that only goes down ends.
#pragma once

#include <array>
#include <cstdint>

#include "traces/formats/run_fields.h"
#include "traces/formats/saved_case.h"

namespace lockstep {

struct CaseSize {
  std::int64_t requests = 0;
  std::int64_t tokens = 0;  // of prompts and planned outputs
  std::int64_t groups = 0;
  std::int64_t layers = 0;
  std::int64_t blocks = 0;
  std::int64_t options = 0;  // that are not the simplest there is
  bool operator==(const CaseSize&) const = default;
};
CaseSize size_of(const SavedCase& saved);

// The most telling number first: requests, groups, layers, steps up to the failure, tokens, and so
// on down to the names of requests.
using CaseRank = std::array<std::int64_t, 14>;
// Where `steps` stands.
inline constexpr std::size_t kRankOfSteps = 4;
CaseRank rank_of(const SavedCase& saved, std::int64_t steps);

// An option that counts, in CaseSize::options, while its value is not the simplest. Limits and
// sizes do not, nor what the engine is called: a failure is one of that engine.
bool counts_as_set(const RunField& field);

}  // namespace lockstep
