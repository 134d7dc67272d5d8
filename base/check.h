// LS_CHECK(condition, format...): a programmer error stops the program, in every build, with the
// values. What a user can cause (a full pool, a bad trace, a CUDA failure) is a value: result.h.
#pragma once

#include <fmt/core.h>

#include <string_view>

namespace lockstep {
[[noreturn]] void check_failed(const char* file, int line, const char* condition,
                               std::string_view message);
}  // namespace lockstep

#define LS_CHECK(condition, ...)                                                               \
  do {                                                                                         \
    if (!(condition)) [[unlikely]]                                                             \
      ::lockstep::check_failed(__FILE__, __LINE__, #condition, ::fmt::format("" __VA_ARGS__)); \
  } while (false)
