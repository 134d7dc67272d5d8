// Files of hidden states on a simulated disk, and a trainer that polls for them: the engine
// continues while they are written, on a disk that is slow, fails and tears writes.
//
// Invariants
// (1) A file that the trainer can see is complete from the first moment, and holds its request's
//     rows. Anything else is a finding of Phase::hidden_file.
// (2) Every file appears, after the last step at the latest.
// (3) All of this depends only on the seed and the times of the steps.
//
// Not simulated: a trainer that lists the folder instead of opening the file that it waits for.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "sim/engine/run_memory.h"
#include "sim/hidden_states/disk.h"
#include "sim/hidden_states/hidden_states.h"
#include "sim/verdict/checked.h"

namespace lockstep {

// Defects that can be planted in the transfer of hidden states; docs/reference/mutants.md describes
// them.
enum class HiddenStateDefect : std::uint8_t {
  none,
  save_race,  // a file is written under the name that it is looked for
};
std::optional<HiddenStateDefect> hidden_state_defect_from_name(std::string_view name);
std::string_view name_of(HiddenStateDefect defect);  // none: empty

class WatchedFiles {
 public:
  WatchedFiles(std::uint64_t seed, HiddenStateDefect defect);

  // What a step has ended. Time never goes back, over all calls.
  void save(std::int64_t now_ns, std::int64_t step, const HiddenStates& states);
  // What the trainer has seen since the last call, up to this time.
  Checked look(std::int64_t now_ns);
  // Until every file has been seen.
  Checked finish();

  std::int64_t num_seen() const { return num_seen_; }

 private:
  struct Expected {
    std::string request;
    std::int64_t step = 0;
    std::vector<std::uint8_t> bytes;
  };
  Checked look_for_all();
  static Divergence difference(const std::string& name, const Expected& expected,
                               std::span<const std::uint8_t> seen);

  Disk disk_;
  WholeFiles files_;
  HiddenStateFileNames names_;
  std::map<std::string, Expected> expected_;  // by file, not seen yet
  std::int64_t now_ns_ = 0;
  std::int64_t num_seen_ = 0;
};

// Hidden states of a run: read out of the cache when their request ends, rank by rank, compared,
// and followed through files that a trainer looks at.
//
// Only one rank alone has rows that are whole: several read their parts and leave no files.
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
