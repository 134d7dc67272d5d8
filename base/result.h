// Result<T>: a value, or the one sentence that tells a user where something is wrong and what to
// do.
#pragma once

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

}  // namespace lockstep
