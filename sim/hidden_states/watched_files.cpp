#include "sim/hidden_states/watched_files.h"

#include <fmt/core.h>
#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "base/check.h"
#include "base/number_text.h"
#include "base/stopwatch.h"
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

// A failed operation is repeated until it succeeds: every file appears in the end.
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
    LS_RETURN_UNLESS_FINE(look_for_all());
  }
  now_ns_ = std::max(now_ns_, now_ns);
  return {};
}

Checked WatchedFiles::finish() {
  while (!expected_.empty()) {
    LS_CHECK(disk_.next_due_ns().has_value(), "{} is neither written nor seen",
             expected_.begin()->first);
    now_ns_ += kLookEveryNs;
    LS_RETURN_UNLESS_FINE(look_for_all());
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
  found.expected =
      hex_bytes(std::span<const std::uint8_t>(expected.bytes).subspan(wrong), kFileBytesShown);
  found.found = hex_bytes(seen.subspan(wrong), kFileBytesShown);
  found.doing = fmt::format("a trainer looks for {}", name);
  found.message = fmt::format("{} with the hidden states of {} can be seen with {} of {} bytes: {}",
                              name, expected.request, seen.size(), expected.bytes.size(),
                              tensors ? "a file of other rows" : tensors.error().message);
  return found;
}

void HiddenStateCheck::begin(const BackendConfig& config, std::span<const RankMemory> ranks,
                             RunSummary& summary) {
  config_ = config;
  summary_ = &summary;
  for (const RankMemory& rank : ranks)
    ranks_.push_back({rank, HiddenStateExtraction(rank.model, rank.worker), {}});
}

Checked HiddenStateCheck::output_taken(std::span<const StoppedRequest> stopped,
                                       std::int64_t now_ns) {
  for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
    Checked compared = extract(ranks_[rank], stopped);
    if (compared) continue;
    if (compared.has_diverged() && ranks_.size() > 1)
      set_rank(config_, static_cast<std::int32_t>(rank), compared.divergence());
    return compared;
  }
  LS_RETURN_UNLESS_FINE(files_.look(now_ns));
  return ranks_.size() == 1 ? keep(ranks_.front(), now_ns) : Checked();
}

Checked HiddenStateCheck::extract(Rank& rank, std::span<const StoppedRequest> stopped) {
  rank.extraction.begin(rank.memory.program.step);
  for (const StoppedRequest& request : stopped) rank.extraction.add(request.id);
  if (rank.extraction.program().extractions.empty()) return {};
  Stopwatch watch;
  LS_RETURN_IF_ERROR(rank.memory.backend.execute(rank.extraction.program(), rank.readback));
  summary_->seconds.execute += watch.lap();
  auto compared = rank.extraction.compare(rank.readback);
  summary_->seconds.compare += watch.lap();
  return compared;
}

// One rank's rows, which are whole.
Checked HiddenStateCheck::keep(Rank& rank, std::int64_t now_ns) {
  if (rank.extraction.program().extractions.empty()) return {};
  const std::vector<HiddenStates> extracted = rank.extraction.states(rank.readback);
  for (const HiddenStates& states : extracted)
    files_.save(now_ns, rank.memory.program.step, states);
  if (!sink_ || extracted.empty()) return {};
  LS_RETURN_IF_ERROR(sink_(extracted));
  return {};
}

Checked HiddenStateCheck::finish(bool agreed) {
  for (const Rank& rank : ranks_) summary_->rows_extracted += rank.extraction.rows_compared();
  if (!agreed) return {};
  LS_RETURN_UNLESS_FINE(files_.finish());
  summary_->hidden_files_seen += files_.num_seen();
  if (ranks_.size() > 1 && summary_->rows_extracted > 0)
    summary_->not_checked.push_back(
        "files of hidden states: every rank reads its own part out of the cache, and none is "
        "whole");
  return {};
}

std::vector<std::string> HiddenStateCheck::not_checked() const {
  const std::int64_t without_a_row = ranks_.front().extraction.requests_without_a_row();
  if (without_a_row == 0) return {};
  return {fmt::format("hidden states of {} requests that ended while preempted", without_a_row)};
}

}  // namespace lockstep
