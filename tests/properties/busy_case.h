// A case with four requests that are always busy: 30 to 33 tokens each, in blocks of four tokens
// and chunks of eight.
#pragma once

#include <string_view>

#include "traces/formats/saved_case.h"

namespace lockstep {

// `faults` as fault_plan_from_text() takes them; empty: none.
SavedCase busy_case(std::string_view faults, bool async_scheduling = false);

}  // namespace lockstep
