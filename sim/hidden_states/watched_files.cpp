#include "sim/hidden_states/watched_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "base/check.h"
#include "base/hex_text.h"
#include "traces/formats/safetensors.h"

namespace lockstep {
namespace {

constexpr std::int64_t kLookEveryNs = 50'000;
constexpr std::int32_t kDiskFailsPercent = 10;
constexpr std::size_t kFileBytesShown = 16;

}  // namespace

std::optional<HiddenStateDefect> hidden_state_defect_from_name(std::string_view name) {
  if (name == name_of(HiddenStateDefect::save_race)) return HiddenStateDefect::save_race;
  return std::nullopt;
}

std::string_view name_of(HiddenStateDefect defect) {
  return defect == HiddenStateDefect::save_race ? "hidden-save-race" : "";
}

// A disk that fails is asked until it does not: every file is seen in the end.
WatchedFiles::WatchedFiles(std::uint64_t seed, HiddenStateDefect defect)
    : disk_({.seed = seed, .fail_percent = kDiskFailsPercent}),
      files_(disk_, std::numeric_limits<std::int32_t>::max(),
             defect == HiddenStateDefect::save_race) {}

void WatchedFiles::save(std::int64_t now_ns, std::int64_t step, const HiddenStates& states) {
  LS_CHECK(now_ns >= now_ns_, "saved at {} ns, after {} ns", now_ns, now_ns_);
  now_ns_ = now_ns;
  const std::string name = names_.next(states.request);
  const auto [expected, is_first] =
      expected_.emplace(name, Expected{states.request, step, hidden_state_file(states)});
  LS_CHECK(is_first, "{} is saved twice", name);
  files_.put(now_ns, name, expected->second.bytes);
}

Checked WatchedFiles::look(std::int64_t now_ns) {
  while (!expected_.empty() && now_ns_ < now_ns) {
    now_ns_ = std::min(now_ns, now_ns_ + kLookEveryNs);
    if (auto found = look_for_all(); !found) return found;
  }
  now_ns_ = std::max(now_ns_, now_ns);
  return {};
}

Checked WatchedFiles::finish() {
  while (!expected_.empty()) {
    LS_CHECK(disk_.next_due_ns().has_value(), "{} is neither written nor seen",
             expected_.begin()->first);
    now_ns_ += kLookEveryNs;
    if (auto found = look_for_all(); !found) return found;
  }
  return {};
}

Checked WatchedFiles::look_for_all() {
  for (const WholeFiles::Outcome& outcome : files_.take_outcomes(now_ns_))
    LS_CHECK(outcome.is_done, "{} was given up", outcome.name);
  for (auto file = expected_.begin(); file != expected_.end();) {
    const auto seen = disk_.read(now_ns_, file->first);
    if (!seen) {
      ++file;
      continue;
    }
    if (*seen != file->second.bytes) return difference(file->first, file->second, *seen);
    ++num_seen_;
    disk_.remove(file->first);
    file = expected_.erase(file);
  }
  return {};
}

Divergence WatchedFiles::difference(const std::string& name, const Expected& expected,
                                    std::span<const std::uint8_t> seen) {
  const auto tensors = read_safetensors(seen);
  const auto wrong =
      std::ranges::mismatch(std::span<const std::uint8_t>(expected.bytes), seen).in1 -
      std::span<const std::uint8_t>(expected.bytes).begin();
  Divergence found;
  found.phase = Phase::hidden_file;
  found.step = expected.step;
  found.request = expected.request;
  found.part = "hidden";
  found.byte = wrong;
  found.expected = hex_bytes(
      std::span<const std::uint8_t>(expected.bytes).subspan(static_cast<std::size_t>(wrong)),
      kFileBytesShown);
  found.found = hex_bytes(seen.subspan(static_cast<std::size_t>(wrong)), kFileBytesShown);
  found.doing = fmt::format("a trainer looks for {}", name);
  found.message = fmt::format("{} with the hidden states of {} can be seen with {} of {} bytes: {}",
                              name, expected.request, seen.size(), expected.bytes.size(),
                              tensors ? "a file of other rows" : tensors.error().message);
  return found;
}

}  // namespace lockstep
