// One of many files that could not be judged, and why; the others were.
#pragma once

#include <string>

namespace lockstep {

struct RefusedFile {
  std::string file;
  std::string reason;  // a sentence that names file and line
};

}  // namespace lockstep
