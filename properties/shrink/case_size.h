// How large a saved case is, as numbers to show and as an order to shrink by.
//
// (1) Of two cases the smaller rank is the simpler case to read; equal cases have equal ranks.
// (2) Every rank is a tuple of numbers that are not negative: whoever only goes down, ends.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "traces/formats/saved_case.h"

namespace lockstep {

struct CaseSize {
  std::int64_t requests = 0;
  std::int64_t tokens = 0;  // of prompts and planned outputs
  std::int64_t groups = 0;
  std::int64_t layers = 0;
  std::int64_t blocks = 0;
  std::int64_t options = 0;  // engine options, settings and choices that are not the default
  bool operator==(const CaseSize&) const = default;
};
CaseSize size_of(const SavedCase& saved);

// The most telling number first: requests, groups, layers, steps up to the failure, tokens, and so
// on down to the names of requests.
using CaseRank = std::array<std::int64_t, 14>;
// Where `steps` stands.
inline constexpr std::size_t kRankOfSteps = 4;
CaseRank rank_of(const SavedCase& saved, std::int64_t steps);

// The engine's limits, which are lowered; every other option of it is reset to its default. What
// the engine is called stays: a failure is one of that engine.
bool is_limit(std::string_view engine_option);
// Settings of a connector that count something: less of it is a smaller case.
bool is_connector_number(std::string_view setting);

}  // namespace lockstep
