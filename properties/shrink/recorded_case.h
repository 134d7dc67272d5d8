// A recording as a saved case: its configuration, and its events and samples step by step. The
// decisions are made anew, by the profile of the engine that was recorded.
#pragma once

#include <string>

#include "base/result.h"
#include "traces/formats/recording.h"
#include "traces/formats/saved_case.h"

namespace lockstep {

// Without a backend. Errors: a recording with a KV connector, groups that no plan can be made for.
Result<SavedCase> case_of(std::string name, Recording recording);

// The requests of a recorded case on a clock on which a step takes as long as a recorded one.
// Errors: as trace_of() of traces/formats/recording_trace.h. REQUIRES: it has a recording.
Result<SavedCase> on_a_clock(const SavedCase& saved);

}  // namespace lockstep
