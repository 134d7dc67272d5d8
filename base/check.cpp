#include "base/check.h"

#include <cstdio>
#include <cstdlib>
#include <utility>

#include "base/failed_check.h"

namespace lockstep {
namespace {

thread_local bool checks_throw = false;

// "sim/engine/lockstep.cpp" of a path that begins at the build folder.
std::string_view in_project(std::string_view file) {
  while (file.starts_with("../")) file.remove_prefix(3);
  return file;
}

}  // namespace

ChecksThrow::ChecksThrow() : before_(std::exchange(checks_throw, true)) {}
ChecksThrow::~ChecksThrow() { checks_throw = before_; }

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
