// A line on a terminal that says how far long work has come. In a pipe or a file it says nothing.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

namespace lockstep {

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

  std::string what_;
  std::int64_t total_;
  bool shown_;
  Clock::time_point next_draw_;
};

}  // namespace lockstep
