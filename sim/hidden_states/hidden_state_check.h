// Hidden states of a run: read out of the cache when their request ends, rank by rank, compared,
// and followed through files that a trainer looks at.
//
// Only one rank alone has rows that are whole: several read their parts and leave no files.
#pragma once

#include <deque>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "sim/engine/memory_check.h"
#include "sim/hidden_states/hidden_states.h"
#include "sim/hidden_states/watched_files.h"

namespace lockstep {

class HiddenStateCheck final : public MemoryCheck {
 public:
  // Receives what a step's output has ended, once it has compared equal. An error ends the run.
  using Sink = std::function<Result<void>(std::span<const HiddenStates>)>;

  HiddenStateCheck(std::uint64_t seed, HiddenStateDefect defect) : files_(seed, defect) {}
  void set_sink(Sink sink) { sink_ = std::move(sink); }

  void begin(const BackendConfig& config, std::span<const RankMemory> ranks,
             RunSummary& summary) override;
  Checked output_taken(std::span<const StoppedRequest> stopped, std::int64_t now_ns) override;
  Checked finish(bool agreed) override;
  std::vector<std::string> not_checked() const override;

 private:
  struct Rank {
    const RankMemory memory;
    HiddenStateExtraction extraction;
    StepReadback readback;
  };
  Checked extract(Rank& rank, std::span<const StoppedRequest> stopped);
  Checked keep(Rank& rank, std::int64_t now_ns);

  WatchedFiles files_;
  Sink sink_;
  RunSummary* summary_ = nullptr;
  BackendConfig config_;  // of the whole model
  std::deque<Rank> ranks_;
};

}  // namespace lockstep
