// How many tokens the captured parts of a step run: those of its batch, or as many as data parallel
// ranks have agreed on.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda_backend/device/device.h"
#include "reference/types/ranks.h"
#include "sim/protocol/backend.h"

namespace lockstep::cuda {

// The size of the graph that takes them all; where none does, the number of them.
inline std::int32_t step_batch(const Device& device, const StepProgram& program) {
  const auto num_tokens = static_cast<std::int32_t>(program.contents.size());
  const std::int32_t size = device.padded_batch(std::max(num_tokens, program.agreed.num_tokens));
  return device.captures(size) ? size : num_tokens;
}

// Rule (10) of sim/protocol/backend.h: which of a request's tokens a rank of context parallelism
// keeps, as positions in its own cache.
// Rows that the rank has of a request's first `num_tokens` tokens: whole rounds over the ranks, and
// its part of the last one.
inline std::int32_t rows_on_rank(const ContextRank& context, std::int32_t num_tokens) {
  const std::int32_t round = context.num_ranks * context.interleave;
  std::int32_t rows = num_tokens / round * context.interleave;
  const std::int32_t rest = num_tokens % round - context.rank * context.interleave;
  if (rest > 0) rows += rest < context.interleave ? rest : context.interleave;
  return rows;
}

}  // namespace lockstep::cuda
