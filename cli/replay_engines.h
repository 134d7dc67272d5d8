// The engines of a replay that is otherwise prepared: one, or as many as there are data parallel
// ranks, each with a scheduler, backends and faults of its own.
#pragma once

#include <string_view>

#include "cli/replay_setup.h"
#include "reference/result.h"

namespace lockstep {

// Errors: what the scheduler refuses, a backend that this machine does not have, or that cannot do
// what the configuration asks for.
Result<void> add_engines(std::string_view backend, const KVTransfer& transfer,
                         PreparedReplay& prepared);

// Every engine meets all of prepared.faults. Errors: faults that are none.
Result<void> add_faults(PreparedReplay& prepared);

}  // namespace lockstep
