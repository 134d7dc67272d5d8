// The end of a replay, for a person and as JSON.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "base/result.h"
#include "cli/options/replay_options.h"
#include "properties/judge/recording_check.h"
#include "sim/hidden_states/hidden_states.h"
#include "sim/session/session.h"

namespace lockstep {

// Where `replay --hidden-states DIR` leaves the hidden states of finished requests.
//
// Invariants
// (1) At any time a file is there whole or not at all (base/output_file.h).
// (2) Every finished request whose hidden states were read has its own file.
class HiddenStateFolder {
 public:
  explicit HiddenStateFolder(std::string path) : path_(std::move(path)) {}

  // Before the run. Refused: a folder that nothing can be written to, a model that keeps no hidden
  // states, several ranks or engines, no backend to read them from.
  Result<void> check(const LockstepConfig& config, bool has_backend) const;
  Result<void> write(std::span<const HiddenStates> requests);

  std::int64_t num_files() const { return num_files_; }
  std::int64_t num_bytes() const { return num_bytes_; }

 private:
  const std::string path_;
  HiddenStateFileNames names_;
  std::int64_t num_files_ = 0;
  std::int64_t num_bytes_ = 0;
};

// What runs: engine, cache, device. One line each.
std::string configuration_text(const OpenReplay& prepared);

// Absent: not counted (HitCounter::applies, another engine decides, a KV connector).
std::optional<CountedHits> hits_of(const OpenReplay& prepared);
// That no prompt of the run fills a block; empty: one may.
std::string unfilled_text(const OpenReplay& prepared);

// The figures and what was not checked. A newline at the end.
std::string summary_text(const RunSummary& summary, const OpenReplay& prepared);

// What was made to go wrong, and how often it did; empty: nothing.
std::string faults_text(const OpenReplay& prepared, const RunSummary& summary);

// Where the run missed the totals of its benchmark file; empty: nowhere, or there are none.
std::string missed_totals(const OpenReplay& prepared, const RunSummary& summary);

// The summary's JSON after `file` and `configuration`. `folder` may be null; `recorded`: of a
// recording.
std::string summary_json(const ReplayOptions& options, const OpenReplay& prepared,
                         const RunSummary& summary, const HiddenStateFolder* folder,
                         const std::optional<RecordingCheck>& recorded);

}  // namespace lockstep
