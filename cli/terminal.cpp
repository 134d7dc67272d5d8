#include "cli/terminal.h"

#include <fmt/format.h>

#include <cstdio>

#include "cli/exit_code.h"

namespace lockstep {

std::string with_commas(std::int64_t value) {
  std::string digits = fmt::format("{}", value);
  const std::size_t first = value < 0 ? 1 : 0;
  for (std::size_t at = digits.size(); at > first + 3;) {
    at -= 3;
    digits.insert(at, 1, ',');
  }
  return digits;
}

std::string counted(std::int64_t count, std::string_view noun) {
  return fmt::format("{} {}{}", with_commas(count), noun, count == 1 ? "" : "s");
}

std::string duration_text(double seconds) {
  if (seconds < 0.001) return fmt::format("{:.0f} us", seconds * 1e6);
  if (seconds < 1) return fmt::format("{:.0f} ms", seconds * 1e3);
  if (seconds < 60) return fmt::format("{:.2f} s", seconds);
  const auto whole = static_cast<std::int64_t>(seconds);
  return fmt::format("{} min {} s", whole / 60, whole % 60);
}

std::string size_text(std::int64_t bytes) {
  if (bytes < 100'000) return counted(bytes, "byte");
  const double mebibytes = static_cast<double>(bytes) / (1024.0 * 1024.0);
  return mebibytes < 1000 ? fmt::format("{:.1f} MiB", mebibytes)
                          : fmt::format("{:.1f} GiB", mebibytes / 1024);
}

std::string percent_text(std::int64_t part, std::int64_t whole) {
  if (whole == 0) return "-";
  return fmt::format("{:.1f} %", 100.0 * static_cast<double>(part) / static_cast<double>(whole));
}

std::string row_text(std::string_view name, std::string_view figure, std::string_view more) {
  return more.empty() ? fmt::format("  {:<14}{:>14}\n", name, figure)
                      : fmt::format("  {:<14}{:>14}   {}\n", name, figure, more);
}

int refuse(std::string_view message) {
  std::fflush(stdout);
  fmt::print(stderr, "lockstep: {}\n", message);
  return kExitRefused;
}

}  // namespace lockstep
