// Turns a failed LS_CHECK (base/check.h) into an exception, for code that judges a step and must
// survive a defect in it.
//
// Invariants
// (1) While a ChecksThrow exists, a check that fails in its thread throws a FailedCheck. In every
//     other thread it still stops the program.
// (2) After the exception, the objects that were checked are in an unknown state: the catcher only
//     destroys them.
//
// Not covered: crashes and hangs. base/child_process.h isolates those.
#pragma once

#include <stdexcept>

namespace lockstep {

// what(): "MESSAGE (FILE:LINE)", or the condition's source text if the check has no message.
class FailedCheck : public std::runtime_error {
 public:
  using runtime_error::runtime_error;
};

// Belongs on the stack of the thread that judges. REQUIRES: destroyed in the thread that created
// it.
class ChecksThrow {
 public:
  ChecksThrow();
  ~ChecksThrow();
  ChecksThrow(const ChecksThrow&) = delete;
  // True while one exists in this thread.
  static bool is_on();

 private:
  const bool before_;  // mode of this thread before the constructor
};

}  // namespace lockstep
