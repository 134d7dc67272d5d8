// The inputs of a recording, for an engine that may decide differently from the recorded one: what
// clients did before each step, what was sampled, what the KV connector answered and reported.
//
// Invariants
// (1) An engine that decides as the recorded one receives the recorded inputs, answer by answer.
// (2) Any other engine receives fitting inputs: a token where the recording has none for a row, the
//     connector's tokens after a different local hit, the report of a load no sooner than its
//     start.
// (3) The run continues after the last recorded step until all requests have ended or deadlock.
#pragma once

#include <memory>

#include "sim/engine/workload.h"
#include "traces/formats/recording.h"

namespace lockstep {

std::unique_ptr<Workload> make_given_inputs(std::shared_ptr<const Recording> recording);

}  // namespace lockstep
