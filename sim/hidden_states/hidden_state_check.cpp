#include "sim/hidden_states/hidden_state_check.h"

#include <fmt/core.h>

#include "base/stopwatch.h"
#include "sim/engine/run_memory.h"

namespace lockstep {

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
  if (auto seen = files_.look(now_ns); !seen) return seen;
  return ranks_.size() == 1 ? keep(ranks_.front(), now_ns) : Checked();
}

Checked HiddenStateCheck::extract(Rank& rank, std::span<const StoppedRequest> stopped) {
  rank.extraction.begin(rank.memory.program.step);
  for (const StoppedRequest& request : stopped) rank.extraction.add(request.id);
  if (rank.extraction.program().extractions.empty()) return {};
  Stopwatch watch;
  if (auto done = rank.memory.backend.execute(rank.extraction.program(), rank.readback); !done)
    return tl::unexpected(done.error());
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
  if (auto taken = sink_(extracted); !taken) return tl::unexpected(taken.error());
  return {};
}

Checked HiddenStateCheck::finish(bool agreed) {
  for (const Rank& rank : ranks_) summary_->rows_extracted += rank.extraction.rows_compared();
  if (!agreed) return {};
  if (auto seen = files_.finish(); !seen) return seen;
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
