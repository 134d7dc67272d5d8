// Result<T>: a value, or an error message that states for the user what is wrong, where, and what
// to do. LS_RETURN_IF_ERROR and LS_ASSIGN_OR_RETURN forward the error.
//
// For everything that a user, a file or a device can cause. A programmer error is an LS_CHECK
// (base/check.h).
#pragma once

#include <fmt/core.h>

#include <string>
#include <tl/expected.hpp>
#include <utility>

namespace lockstep {

// Only a message: no code decides by the kind of an error.
struct Error {
  std::string message;  // "FILE:LINE: FIELD: what is wrong; what was expected", no trailing newline
};

template <class T>
using Result = tl::expected<T, Error>;

// Makes an error, in a function that returns any Result: return fail("{}: not a file", path).
inline tl::unexpected<Error> fail(std::string message) {
  return tl::unexpected<Error>(Error{std::move(message)});
}
template <class First, class... More>
tl::unexpected<Error> fail(fmt::format_string<First, More...> format, First&& first,
                           More&&... more) {
  return fail(fmt::format(format, std::forward<First>(first), std::forward<More>(more)...));
}

// A file that could not be checked, among many. The others were.
struct RefusedFile {
  std::string file;
  std::string reason;  // error message, with file and line
};

}  // namespace lockstep

// LS_RETURN_IF_ERROR(check(x)): returns the Error of a Result, or continues.
#define LS_RETURN_IF_ERROR(...)                                  \
  do {                                                           \
    if (auto ls_result = (__VA_ARGS__); !ls_result) [[unlikely]] \
      return ::tl::unexpected(std::move(ls_result).error());     \
  } while (false)

// LS_ASSIGN_OR_RETURN(const auto plan, make_plan(x)): declares the value, or returns the Error. The
// value is moved out of the Result. It expands to several statements, so it needs braces after an
// `if`.
#define LS_ASSIGN_OR_RETURN(declaration, ...) \
  LS_ASSIGN_OR_RETURN_AS(LS_NAME(ls_result, __COUNTER__), declaration, __VA_ARGS__)
#define LS_ASSIGN_OR_RETURN_AS(result, declaration, ...) \
  auto result = (__VA_ARGS__);                           \
  if (!result) [[unlikely]]                              \
    return ::tl::unexpected(std::move(result).error());  \
  declaration = *std::move(result)
#define LS_NAME(prefix, number) LS_JOINED(prefix, number)
#define LS_JOINED(prefix, number) prefix##number
