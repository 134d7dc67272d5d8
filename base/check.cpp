#include "base/check.h"

#include <cstdio>
#include <cstdlib>
#include <utility>

#include "base/failed_check.h"

namespace lockstep {
namespace {

// True while a ChecksThrow exists in this thread. Per thread, because other threads of the process
// may not catch.
thread_local bool checks_throw = false;

// Removes the leading "../" of a path that is relative to the build folder:
// "sim/engine/lockstep.cpp". Reports quote the result, so it must not depend on the build folder.
std::string_view in_project(std::string_view file) {
  while (file.starts_with("../")) file.remove_prefix(3);
  return file;
}

}  // namespace

// Nested objects restore the previous value, so the innermost destructor does not end the mode of
// the outer one.
ChecksThrow::ChecksThrow() : before_(std::exchange(checks_throw, true)) {}
ChecksThrow::~ChecksThrow() { checks_throw = before_; }
bool ChecksThrow::is_on() { return checks_throw; }

// Never returns. A judge in the parent process reads "FILE:LINE: check failed" from the last lines
// of standard error (properties/judge/failure.cpp), so the form of that line is an interface.
// Aborts instead of exiting: destructors would run on an inconsistent state, and a debugger needs
// the stack.
void check_failed(const char* file, int line, const char* condition, std::string_view message) {
  if (checks_throw)
    throw FailedCheck(
        fmt::format("{} ({}:{})", message.empty() ? condition : message, in_project(file), line));
  fmt::print(stderr, "{}:{}: check failed: {}{}{}\n", file, line, condition,
             message.empty() ? "" : ": ", message);
  std::fflush(stderr);
  std::abort();
}

}  // namespace lockstep
