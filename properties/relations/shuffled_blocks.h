// Block ids are names: a pool that hands them out in another order decides the same, name for name.
//
// (1) Everything that a recording shows is compared, step by step: who runs with how many tokens,
//     on which blocks, hits, evictions, what is zeroed.
// (2) The two runs' blocks correspond by the place that they had in the first free queue, for good:
//     who is evicted first depends on when blocks were freed, never on their numbers.
//
// Left out: the order of the zero list, which vllm-0.33.0 takes from a set of ids.
#pragma once

#include <optional>

#include "base/result.h"
#include "properties/relations/relations.h"
#include "traces/formats/saved_case.h"

namespace lockstep {

// Nothing: the same was decided. Errors: what the engine refuses.
Result<std::optional<Breach>> check_shuffled_blocks(const SavedCase& saved);

}  // namespace lockstep
