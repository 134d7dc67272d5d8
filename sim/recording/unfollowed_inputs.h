// Inputs that a recording may hold and the model's scheduler does not support: replay and the
// judges refuse the recording and name the input.
#pragma once

#include <string>

#include "traces/formats/recording.h"

namespace lockstep {

// One line that names the unsupported input; empty: all inputs are supported.
std::string unfollowed_input(const RecordingHeader& header);
std::string unfollowed_input(const RecordedStep& step);

}  // namespace lockstep
