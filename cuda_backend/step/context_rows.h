// Which of a request's tokens a rank of context parallelism keeps, as positions in its own cache:
// rule (10) of sim/protocol/backend.h.
#pragma once

#include <cstdint>

#include "reference/types/ranks.h"

namespace lockstep::cuda {

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
