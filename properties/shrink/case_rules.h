// Configurations that an engine refuses to start with, or that nobody would serve: a shrink that
// wandered into one would end in a failure that no engine can have.
//
// (1) A rule that the first case of a shrink breaks itself is not asked of the others.
//
// Not looked at: what the reader refuses (it does that), and what the planner does with memory.
#pragma once

#include <cstdint>

#include "traces/formats/saved_case.h"

namespace lockstep {

// One bit for each rule that the case breaks:
//   a step has room for a token of every running request, and without chunks for the longest one
//   the limit on long prefills is not above max_model_len
//   the pool holds a request of max_model_len, and no request of the case is longer
//   drafts have a method and a method has drafts; state groups keep a block for each draft
//   all state groups have the mode of the engine; prefix caching has a mode that saves states, and
//   a mode that saves states has prefix caching
//   with states in mode align a step reaches the next block, and prompts come in chunks
//   a window and a chunk are tokens; nothing else has them
using BrokenRules = std::uint32_t;
BrokenRules broken_rules(const SavedCase& saved);

}  // namespace lockstep
