// A saved case with something of everything, as the start of a shrink.
#pragma once

#include <cstdint>
#include <string>

#include "traces/formats/saved_case.h"

namespace lockstep {

// Full attention, a window and states in mode align, two layers each; every option away from its
// default that the three can be run with; `num_requests` requests of several runs, some of which
// wait for others, leave early, have a salt or a priority.
SavedCase large_case(std::int64_t num_requests);

// The same case decided so: its decisions as the reference makes them are its recording.
SavedCase recorded(const SavedCase& saved);

}  // namespace lockstep
