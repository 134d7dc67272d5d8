// What a recording may hold and the model's scheduler does not follow: whoever replays it or judges
// its decisions refuses it, and says which input it is.
#pragma once

#include <string>

#include "traces/formats/recording.h"

namespace lockstep {

// One sentence that names the input; empty: all is followed.
std::string unfollowed_input(const RecordingHeader& header);
std::string unfollowed_input(const RecordedStep& step);

}  // namespace lockstep
