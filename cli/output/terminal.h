// Text for a person: numbers, durations, columns, how far work is; and what exit statuses mean.
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

// What every command's exit status means.
inline constexpr int kExitAgreed = 0;         // everything that was compared is equal
inline constexpr int kExitDisagreed = 1;      // a divergence, a violation, a mismatch
inline constexpr int kExitRefused = 2;        // an input or an option is wrong, or a device failed
inline constexpr int kExitStuck = 3;          // requests wait forever
inline constexpr int kExitNotReproduced = 4;  // a saved failure does not fail here

std::string duration_text(double seconds);                        // "850 ms", "12.3 s", "2 min 5 s"
std::string size_text(std::int64_t bytes);                        // "8,192 bytes", "1.2 GiB"
std::string percent_text(std::int64_t part, std::int64_t whole);  // "40.2 %"; "-" of nothing

// One line of a table: a name, a figure, and what more there is to say.
std::string row_text(std::string_view name, std::string_view figure, std::string_view more = {});

// The list that ends the text of every command that judges, "\nNot checked:\n" and a line each;
// empty: nothing was left out. Its JSON has the same list as `not_checked`.
std::string not_checked_text(std::span<const std::string> not_checked);

// What fmt::print throws when standard output takes no more, or any other exception.
std::string text_of(const std::exception& error);
// Prints "lockstep: MESSAGE" to stderr; kExitRefused.
int refuse(std::string_view message);
// Of a command that has ended, or refuses.
int exit_status(const Result<int>& ended);

// A line on a terminal that says how far long work has come, and after a second how long the rest
// takes at that rate.
//
// Invariants
// (1) In a pipe or a file nothing is written: shown() is false for the object's whole life.
// (2) The line is on the terminal only while the object lives, and changes at most every 80 ms.
class Progress {
 public:
  // `total` of 0: not known, only what is done is shown.
  Progress(std::string what, std::int64_t total);
  ~Progress();  // takes the line away
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  bool shown() const { return shown_; }
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
