// A story as text for a terminal: the case, its steps, and at the end what went wrong, where, what
// was expected there and why.
#pragma once

#include <string>

#include "properties/story/story.h"
#include "traces/formats/saved_case.h"

namespace lockstep {

struct StoryTextOptions {
  std::size_t steps_max = 12;  // the last ones; 0: all
};

// Ends with the sentence of the check that failed.
std::string to_text(const SavedCase& saved, const Story& story,
                    const StoryTextOptions& options = {});
// The same as one JSON object.
std::string to_json(const SavedCase& saved, const Story& story);

}  // namespace lockstep
