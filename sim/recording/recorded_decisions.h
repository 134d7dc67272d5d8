// The decisions of a recording, followed unchanged on its own inputs (recording_workload.h).
//
// Invariants
// (1) Step n of the run is step n of the recording: tables, tokens, outputs, ends.
// (2) A request has its prompt and what the outputs gave it: nothing of a step in flight when a
//     reset preempted the request, and of a stale output what the recording says.
//
// Not here: whether the decisions make sense (the audit), and whether the model makes the same
// (conform).
#pragma once

#include <memory>

#include "reference/schedule/decision_source.h"
#include "traces/formats/recording.h"

namespace lockstep {

// A decision that names an unknown request, or a step that is not there, is an EngineFailure of
// kind "recording".
DecisionsFactory recorded_decisions(std::shared_ptr<const Recording> recording);

}  // namespace lockstep
