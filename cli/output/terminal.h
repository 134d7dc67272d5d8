// Formats text for a person: numbers, durations, columns, progress; and defines the exit statuses.
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <span>
#include <string>
#include <string_view>

#include "base/number_text.h"
#include "base/result.h"

namespace lockstep {

// Exit statuses of every command.
inline constexpr int kExitAgreed = 0;         // everything that was compared is equal
inline constexpr int kExitDisagreed = 1;      // a divergence, a violation, a mismatch
inline constexpr int kExitRefused = 2;        // an input or an option is wrong, or a device failed
inline constexpr int kExitStuck = 3;          // requests wait forever
inline constexpr int kExitNotReproduced = 4;  // a saved failure does not fail here

std::string duration_text(double seconds);                        // "12.30 s", "2 min 5 s"
std::string size_text(std::int64_t bytes);                        // "8,192 bytes", "1.2 GiB"
std::string percent_text(std::int64_t part, std::int64_t whole);  // "40.2 %"; "-" of nothing

// Returns one line of a table: a name, a figure, and further words.
std::string row_text(std::string_view name, std::string_view figure, std::string_view more = {});

// Returns the list that ends the text of commands that judge (docs/commands.md): "\nNot checked:\n"
// and a line each; empty: nothing was left out. The JSON has the same list as `not_checked`.
std::string not_checked_text(std::span<const std::string> not_checked);

// Returns the message of an exception. A failed print is reported as a lost standard output.
std::string text_of(const std::exception& error);
// Prints "lockstep: MESSAGE" to standard error and returns kExitRefused. Never throws.
int refuse(std::string_view message);
// Returns the exit status of a command, after printing its error if it has one.
int exit_status(const Result<int>& ended);

// Shows a line on a terminal with the progress of long work, and after a second the estimated time
// left, at the rate so far.
//
// Invariants
// (1) Nothing is written to a pipe or a file: shown() is false for the object's whole life.
// (2) The line is on the terminal only while the object exists, and changes at most every 80 ms.
class Progress {
 public:
  // `total` 0: unknown, so only the number of finished items is shown.
  Progress(std::string what, std::int64_t total);
  ~Progress();  // clears the line
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  bool shown() const { return shown_; }
  // Shows `done` of `total` and a note. Cheap if shown() is false or 80 ms have not passed.
  // REQUIRES: one thread at a time.
  void at(std::int64_t done, std::string_view note = {});

 private:
  using Clock = std::chrono::steady_clock;

  std::string left_text(std::int64_t done) const;  // ", about 2 min 5 s left"; empty: not known

  std::string what_;
  std::int64_t total_;
  bool shown_;
  Clock::time_point begin_, next_draw_;
};

}  // namespace lockstep
