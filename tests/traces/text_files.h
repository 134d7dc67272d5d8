// Files of these tests: texts written to the temporary folder, refusals with the path taken out,
// and the smallest saved case.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <string_view>

#include "base/result.h"
#include "traces/formats/saved_case.h"

namespace lockstep::testing_files {

// A path of this test's own in the temporary folder, cleared of an older file.
std::string temporary_path(std::string_view name);
std::string write_temporary(std::string_view text, std::string_view name = "input");
std::string read_whole(const std::string& path);

// The error's message with `path` written as FILE; "read without an error" when there is none.
template <class T>
std::string refusal(const Result<T>& result, const std::string& path) {
  if (result) return "read without an error";
  std::string message = result.error().message;
  if (message.starts_with(path)) message.replace(0, path.size(), "FILE");
  return message;
}

// A text that a reader refuses, and its sentence with the path written as FILE.
struct Refused {
  const char* what;
  std::string text;
  const char* message;
};
inline void PrintTo(const Refused& refused, std::ostream* out) { *out << refused.what; }

// `text` with the first `from` replaced by `to`; fails the test when there is none.
std::string changed(std::string text, std::string_view from, std::string_view to);

// What a saved case cannot do without.
SavedCase smallest_case();

}  // namespace lockstep::testing_files
