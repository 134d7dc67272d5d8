// What a check comes to: fine, a divergence, or an error.
//
// LS_RETURN_UNLESS_FINE hands both on. An Error is a user's, or a backend's that failed.
#pragma once

#include <utility>
#include <variant>

#include "base/result.h"
#include "sim/verdict/divergence.h"

namespace lockstep {

class [[nodiscard]] Checked {
 public:
  Checked() = default;  // fine
  Checked(Divergence found) : what_(std::move(found)) {}
  Checked(tl::unexpected<Error> error) : what_(std::move(error.value())) {}
  // A divergence, or the error that kept it from being found.
  Checked(Result<Divergence> found) {
    if (found)
      what_ = std::move(*found);
    else
      what_ = std::move(found.error());
  }

  explicit operator bool() const { return std::holds_alternative<Fine>(what_); }
  bool has_diverged() const { return std::holds_alternative<Divergence>(what_); }
  bool has_error() const { return std::holds_alternative<Error>(what_); }
  // REQUIRES: it is one.
  Divergence& divergence() { return std::get<Divergence>(what_); }
  const Divergence& divergence() const { return std::get<Divergence>(what_); }
  const Error& error() const { return std::get<Error>(what_); }

 private:
  struct Fine {};
  std::variant<Fine, Divergence, Error> what_;
};

}  // namespace lockstep

// LS_RETURN_UNLESS_FINE(check(x)): returns the divergence or the error of a Checked, or continues.
#define LS_RETURN_UNLESS_FINE(...)                                 \
  do {                                                             \
    if (auto ls_checked = (__VA_ARGS__); !ls_checked) [[unlikely]] \
      return ls_checked;                                           \
  } while (false)
