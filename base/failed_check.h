// A failed LS_CHECK (check.h) as a result, where a step is judged.
//
// Invariants
// (1) While a ChecksThrow lives, a check that fails in its thread throws a FailedCheck; in every
//     other thread it stops the program.
// (2) The catcher only destroys the objects that were checked.
#pragma once

#include <stdexcept>

namespace lockstep {

// what(): the message, then the file and line.
class FailedCheck : public std::runtime_error {
 public:
  using runtime_error::runtime_error;
};

class ChecksThrow {
 public:
  ChecksThrow();
  ~ChecksThrow();
  ChecksThrow(const ChecksThrow&) = delete;

 private:
  const bool before_;
};

}  // namespace lockstep
