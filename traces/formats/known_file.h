// Known failures, by ids of the user: {"lockstep_known":1,"known":[{"id":..,
// "check":..,"text":..,"until":"2027-01-31"}]}. `text`, part of the message, and `until`, the last
// day on which the failure is ignored, are optional.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace lockstep {

struct KnownFailure {
  std::string id;
  std::string check;  // as the fuzzer names it: "audit.handed_out"
  std::string text;   // in the failure's sentence; empty: any
  std::string until;  // "2027-01-31"; empty: forever
};

// Errors: not such a file, a date that is none, an id twice.
Result<std::vector<KnownFailure>> read_known_file(const std::string& path);

}  // namespace lockstep
