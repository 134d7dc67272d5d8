// What a KV connector answered and its workers reported in a step, in sentences of a story.
#pragma once

#include <string>
#include <vector>

#include "properties/story/story.h"

namespace lockstep {

// What it said of those that were asked about while the step was decided.
std::vector<std::string> answers_told(const RecordedStep& step);
// Where the tokens before the first one that is scheduled come from: "16 tokens before are a prefix
// hit". REQUIRES: there are some, and the request begins to run in this step.
std::string origin_told(const RecordedStep& step, const RecordedScheduled& scheduled);
// What moved, or did not, while the step ran.
std::vector<std::string> reports_told(const RecordedStep& step);

}  // namespace lockstep
