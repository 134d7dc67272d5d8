// The engines of a replay that is otherwise prepared: one, or as many as there are data parallel
// ranks, each with a scheduler, backends, a connector and faults of its own.
#pragma once

#include <string_view>

#include "base/result.h"
#include "cli/replay_setup.h"

namespace lockstep {

// Each has a connector of its own, where there is one, and meets all of prepared.faults. Errors:
// what the scheduler refuses, faults that are none, a backend that this machine does not have, or
// that cannot do what the configuration asks for.
Result<void> add_engines(std::string_view backend, PreparedReplay& prepared);

}  // namespace lockstep
