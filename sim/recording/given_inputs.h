// The inputs of a recording, for an engine that may decide otherwise than the recorded one: what
// clients did before each step, what was sampled, what the KV connector answered and reported.
//
// (1) An engine that decides as the recorded one did is given what was recorded, answer by answer.
// (2) Any other engine is given what fits: a token where the recording has none for a row, the
//     tokens that the connector has behind another local hit, the report of a load no sooner than
//     the load has begun.
// (3) The run goes on behind the last recorded step until all requests have ended or wait forever.
#pragma once

#include <memory>

#include "sim/engine/workload.h"
#include "traces/formats/recording.h"

namespace lockstep {

std::unique_ptr<Workload> make_given_inputs(std::shared_ptr<const Recording> recording);

}  // namespace lockstep
