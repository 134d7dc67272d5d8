#include "cli/progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "cli/terminal.h"

namespace lockstep {
namespace {

constexpr std::int64_t kBarWidth = 24;
constexpr auto kBetweenDraws = std::chrono::milliseconds(80);
constexpr std::string_view kClearLine = "\r\x1b[K";

}  // namespace

Progress::Progress(std::string what, std::int64_t total)
    : what_(std::move(what)),
      total_(total),
      shown_(isatty(STDERR_FILENO) == 1),
      next_draw_(Clock::now() + 3 * kBetweenDraws) {}

Progress::~Progress() {
  if (shown_) fmt::print(stderr, "{}", kClearLine);
}

void Progress::at(std::int64_t done, std::string_view note) {
  if (!shown_ || Clock::now() < next_draw_) return;
  next_draw_ = Clock::now() + kBetweenDraws;
  std::string bar;
  if (total_ > 0) {
    const std::int64_t full = std::min(done, total_) * kBarWidth / total_;
    bar = fmt::format(" [{:#<{}}{:.<{}}]", "", full, "", kBarWidth - full);
  }
  const std::string of = total_ > 0 ? " of " + with_commas(total_) : "";
  fmt::print(stderr, "{}{}{} {}{} {}", kClearLine, what_, bar, with_commas(done), of, note);
  std::fflush(stderr);
}

}  // namespace lockstep
