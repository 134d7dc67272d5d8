// One engine over several ranks, each on a CPU executor of its own.
#pragma once

#include <cstdint>
#include <vector>

#include "tests/sim/world.h"

namespace lockstep {

// Runs make_traffic(3, num_requests). `ranks[i]` is the rank that the i-th backend takes itself
// for; empty: each its own.
Result<RunReport> run_on_ranks(const LockstepConfig& config, int num_requests,
                               std::vector<std::int32_t> ranks = {});

}  // namespace lockstep
