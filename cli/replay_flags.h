// What the options of `lockstep replay` change in a configuration, and which combinations of both
// are refused.
//
// An option that was not given changes nothing: what the file says stands.
#pragma once

#include <string_view>

#include "base/result.h"
#include "cli/replay_options.h"
#include "sim/engine/workload.h"
#include "sim/session/session.h"

namespace lockstep {

void apply_engine_flags(const ReplayOptions& options, EngineConfig& engine);
void apply_device_flags(const ReplayOptions& options, LockstepConfig& config);
void apply_workload_flags(const ReplayOptions& options, TraceWorkloadOptions& workload);

// Combinations that the engine refuses to start with.
Result<void> check_engine(const EngineConfig& engine);
// What several ranks or engines cannot be asked. `backend`: the one that was chosen.
Result<void> check_parallel(const LockstepConfig& config, std::string_view backend);
// Events are told in the engine's own hashes, which only a trace's run can be asked to make.
Result<void> check_cache_events(const ReplayOptions& options, const EngineConfig& engine);

}  // namespace lockstep
