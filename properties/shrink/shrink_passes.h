// The ways in which a case is made smaller, one file each. A pass tries what it knows once through
// and leaves the best case behind; shrinker.h goes round them until none gets anywhere.
#pragma once

#include "properties/shrink/shrink_trial.h"

namespace lockstep {

// Whole parts of the input: records by delta debugging, recorded steps, faults, mutants; a
// recording as the trace of its requests.
void shrink_records(ShrinkTrial& trial);
// Prompts run by run and token by token, outputs, and everything else that is said of a request.
void shrink_requests(ShrinkTrial& trial);
// When things arrive: together, and at the start.
void shrink_arrivals(ShrinkTrial& trial);
// Groups, layers, heads, elements, states, blocks and their sizes, windows, the pool.
void shrink_plan(ShrinkTrial& trial);
// Options to their defaults one by one, limits down.
void shrink_options(ShrinkTrial& trial);
// All counts of tokens at once, by half: prompts, outputs, blocks, windows, limits.
void shrink_scale(ShrinkTrial& trial);

}  // namespace lockstep
