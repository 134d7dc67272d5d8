#include "cli/output/terminal.h"

#include <fmt/format.h>

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <system_error>
#include <utility>

namespace lockstep {

std::string duration_text(double seconds) {
  if (seconds < 0.001) return fmt::format("{:.0f} us", seconds * 1e6);
  if (seconds < 1) return fmt::format("{:.0f} ms", seconds * 1e3);
  if (seconds < 60) return fmt::format("{:.2f} s", seconds);
  const auto whole = static_cast<std::int64_t>(seconds);
  return fmt::format("{} min {} s", whole / 60, whole % 60);
}

std::string size_text(std::int64_t bytes) {
  // Small counts are shown exactly, since a difference of one byte may matter there.
  if (bytes < 100'000) return counted(bytes, "byte");
  const double mebibytes = static_cast<double>(bytes) / (1024.0 * 1024.0);
  return mebibytes < 1000 ? fmt::format("{:.1f} MiB", mebibytes)
                          : fmt::format("{:.1f} GiB", mebibytes / 1024);
}

std::string percent_text(std::int64_t part, std::int64_t whole) {
  // Nothing of nothing is not 0 %: no prompt token could have been hit.
  if (whole == 0) return "-";
  return fmt::format("{:.1f} %", 100.0 * static_cast<double>(part) / static_cast<double>(whole));
}

std::string row_text(std::string_view name, std::string_view figure, std::string_view more) {
  return more.empty() ? fmt::format("  {:<14}{:>14}\n", name, figure)
                      : fmt::format("  {:<14}{:>14}   {}\n", name, figure, more);
}

std::string not_checked_text(std::span<const std::string> not_checked) {
  std::string text = not_checked.empty() ? "" : "\nNot checked:\n";
  for (const std::string& line : not_checked) text += fmt::format("  - {}\n", line);
  return text;
}

std::string text_of(const std::exception& error) {
  // std::filesystem's errors are system errors too, but their messages name a file.
  const auto* lost = dynamic_cast<const std::system_error*>(&error);
  if (lost == nullptr || dynamic_cast<const std::filesystem::filesystem_error*>(lost) != nullptr)
    return error.what();
  return fmt::format("standard output: cannot be written: {}", lost->code().message());
}

int refuse(std::string_view message) {
  // What the command has printed precedes the error on a shared terminal.
  std::fflush(stdout);
  std::fputs(fmt::format("lockstep: {}\n", message).c_str(), stderr);  // never throws
  return kExitRefused;
}

int exit_status(const Result<int>& ended) { return ended ? *ended : refuse(ended.error().message); }

namespace {

constexpr std::int64_t kBarWidth = 24;
constexpr auto kBetweenDraws = std::chrono::milliseconds(80);
constexpr std::string_view kClearLine = "\r\x1b[K";
// A rate over less than a second misleads: the first cases are often the slowest.
constexpr auto kLeastToTell = std::chrono::seconds(1);

}  // namespace

Progress::Progress(std::string what, std::int64_t total)
    : what_(std::move(what)),
      total_(total),
      shown_(isatty(STDERR_FILENO) == 1),
      begin_(Clock::now()),
      // Short work ends before the line appears.
      next_draw_(begin_ + 3 * kBetweenDraws) {}

Progress::~Progress() {
  if (shown_) fmt::print(stderr, "{}", kClearLine);
}

void Progress::at(std::int64_t done, std::string_view note) {
  if (!shown_ || Clock::now() < next_draw_) return;
  next_draw_ = Clock::now() + kBetweenDraws;
  std::string bar;
  if (total_ > 0) {
    // `done` may exceed `total` if the caller underestimated it.
    const std::int64_t full = std::min(done, total_) * kBarWidth / total_;
    bar = fmt::format(" [{:#<{}}{:.<{}}]", "", full, "", kBarWidth - full);
  }
  const std::string of = total_ > 0 ? " of " + with_commas(total_) : "";
  fmt::print(stderr, "{}{}{} {}{}{}{}{}", kClearLine, what_, bar, with_commas(done), of,
             note.empty() ? "" : " ", note, left_text(done));
  std::fflush(stderr);
}

std::string Progress::left_text(std::int64_t done) const {
  const std::chrono::duration<double> so_far = Clock::now() - begin_;
  if (so_far < kLeastToTell || done <= 0 || done >= total_) return {};
  // Rounded up below a minute, so that the estimate is never "0 s".
  const double left =
      so_far.count() * static_cast<double>(total_ - done) / static_cast<double>(done);
  return fmt::format(", about {} left",
                     left < 60 ? fmt::format("{:.0f} s", std::ceil(left)) : duration_text(left));
}

}  // namespace lockstep
