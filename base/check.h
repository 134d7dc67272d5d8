// LS_CHECK(condition, format...): stops the program, in every build, if a programmer error made the
// condition false. The message holds the values.
//
// - An error that a user can cause (a full pool, a bad trace, a CUDA failure) is a value, not a
//   check: base/result.h.
// - The arguments of the message are evaluated only if the condition is false, so they may be
//   expensive.
// - Inside a ChecksThrow (base/failed_check.h) a failed check throws instead of aborting.
// - Device code has no LS_CHECK: a trap would destroy the CUDA context.
#pragma once

#include <fmt/core.h>

#include <string_view>

namespace lockstep {
// Target of the macro. `condition`: its source text, printed if `message` is empty.
[[noreturn]] void check_failed(const char* file, int line, const char* condition,
                               std::string_view message);
}  // namespace lockstep

// The "" before __VA_ARGS__ is joined with the format string, so that LS_CHECK(x) without a message
// compiles and a format that is not a literal does not.
#define LS_CHECK(condition, ...)                                                               \
  do {                                                                                         \
    if (!(condition)) [[unlikely]]                                                             \
      ::lockstep::check_failed(__FILE__, __LINE__, #condition, ::fmt::format("" __VA_ARGS__)); \
  } while (false)
