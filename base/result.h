// Result<T>: a value, or the error message that tells a user where something is wrong and what to
// do. LS_RETURN_IF_ERROR and LS_ASSIGN_OR_RETURN forward a failure.
#pragma once

#include <fmt/core.h>

#include <string>
#include <tl/expected.hpp>
#include <utility>

namespace lockstep {

struct Error {
  std::string message;  // "FILE:LINE: FIELD: what is wrong; what was expected", no trailing newline
};

template <class T>
using Result = tl::expected<T, Error>;

inline tl::unexpected<Error> fail(std::string message) {
  return tl::unexpected<Error>(Error{std::move(message)});
}
template <class First, class... More>
tl::unexpected<Error> fail(fmt::format_string<First, More...> format, First&& first,
                           More&&... more) {
  return fail(fmt::format(format, std::forward<First>(first), std::forward<More>(more)...));
}

// One of many files that could not be judged, and why; the others were.
struct RefusedFile {
  std::string file;
  std::string reason;  // a message that names file and line
};

}  // namespace lockstep

// LS_RETURN_IF_ERROR(check(x)): returns the Error of a Result, or continues.
#define LS_RETURN_IF_ERROR(...)                                  \
  do {                                                           \
    if (auto ls_result = (__VA_ARGS__); !ls_result) [[unlikely]] \
      return ::tl::unexpected(std::move(ls_result).error());     \
  } while (false)

// LS_ASSIGN_OR_RETURN(const auto plan, make_plan(x)): declares the value, or returns the Error.
#define LS_ASSIGN_OR_RETURN(declaration, ...) \
  LS_ASSIGN_OR_RETURN_AS(LS_NAME(ls_result, __COUNTER__), declaration, __VA_ARGS__)
#define LS_ASSIGN_OR_RETURN_AS(result, declaration, ...) \
  auto result = (__VA_ARGS__);                           \
  if (!result) [[unlikely]]                              \
    return ::tl::unexpected(std::move(result).error());  \
  declaration = *std::move(result)
#define LS_NAME(prefix, number) LS_JOINED(prefix, number)
#define LS_JOINED(prefix, number) prefix##number
