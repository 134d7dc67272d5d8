// What `lockstep conform` is pointed at: recordings of schedules and of memory plans, found in
// files and folders by what they hold.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/result.h"

namespace lockstep {

struct ConformInputs {
  std::vector<std::string> schedules;  // sorted, each once
  std::vector<std::string> layouts;    // likewise
  std::int64_t others = 0;             // files in the folders that are neither
};

// Errors: a path that is not there, a file that is named and is neither, nothing found at all.
Result<ConformInputs> find_conform_inputs(const std::vector<std::string>& paths);

}  // namespace lockstep
