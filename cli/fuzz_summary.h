// The report of a fuzz run for a person, and the exit status that follows from it.
#pragma once

#include <string>

#include "properties/fuzz/fuzz.h"

namespace lockstep {

// `seconds` of 0: the report was merged, and nothing ran here.
std::string fuzz_summary_text(const FuzzReport& report, double seconds);
int fuzz_exit_code(const FuzzReport& report);

}  // namespace lockstep
