// The tokens that a request of a trace will be answered with: as the trace says, or made from
// (seed, request, index) when it only says how many.
#pragma once

#include <cstdint>
#include <optional>

#include "reference/memory/content.h"
#include "traces/formats/request_trace.h"

namespace lockstep {

class PlannedOutput {
 public:
  PlannedOutput() = default;
  // `ordinal` counts the requests of the trace.
  PlannedOutput(const TraceRequest& request, std::uint64_t seed, std::uint64_t ordinal);

  // Output token `index`, also beyond the planned end (a step in flight, a draft).
  std::int32_t token(std::int64_t index) const;
  // What a draft for output token `index` proposes: the right token in `acceptance_percent` of all
  // cases.
  std::int32_t draft(std::int64_t index, std::int32_t acceptance_percent) const;

 private:
  std::int32_t made(std::int64_t index) const;

  OutputPlan plan_;
  std::optional<std::int32_t> eos_;
  bool ends_with_eos_ = false;
  std::uint64_t key_ = 0;
};

}  // namespace lockstep
