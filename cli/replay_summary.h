// Describes a replay for a person and as JSON: its configuration before the run, its figures and
// its verdict after it, and the files of hidden states.
//
// Every figure comes from RunSummary; nothing is counted here except files and bytes written.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "base/result.h"
#include "cli/options/replay_options.h"
#include "properties/judge/failure.h"
#include "properties/judge/recording_check.h"
#include "sim/hidden_states/hidden_states.h"
#include "sim/session/session.h"

namespace lockstep {

// Writes the hidden states of finished requests into the folder of `replay --hidden-states DIR`.
//
// Invariants
// (1) At any time a file is complete or absent (base/output_file.h).
// (2) Every finished request whose hidden states were read has its own file, also if several
//     requests have one name.
class HiddenStateFolder {
 public:
  explicit HiddenStateFolder(std::string path) : path_(std::move(path)) {}

  // Called before the run. Refused: a folder that cannot be written, a model without hidden states,
  // several ranks or engines, which would each hold a part, and a run without a backend.
  Result<void> check(const LockstepConfig& config, bool has_backend) const;
  // Writes one safetensors file per request. Errors: the disk.
  Result<void> write(std::span<const HiddenStates> requests);

  std::int64_t num_files() const { return num_files_; }
  std::int64_t num_bytes() const { return num_bytes_; }

 private:
  const std::string path_;
  HiddenStateFileNames names_;
  std::int64_t num_files_ = 0;
  std::int64_t num_bytes_ = 0;
};

// Returns what runs, one line each: engine, cache groups, pool, device, ranks, planted defects and
// faults, and the options that were chosen from the file.
std::string configuration_text(const OpenReplay& prepared);

// Returns the prefix hits of all engines together. Absent: not counted, since the configuration
// cannot lose hits, another engine decides, or a KV connector takes part.
std::optional<CountedHits> hits_of(const OpenReplay& prepared);
// Returns a warning that no prompt of the run is long enough to be found by prefix; empty: one may
// be. block_size 1,056 and prompts of 800 tokens: prefix caching never hits.
std::string unfilled_text(const OpenReplay& prepared);

// Returns the figures and what was not checked, one line each.
std::string summary_text(const RunSummary& summary, const OpenReplay& prepared);

// Returns the planned faults and how often each kind took effect; empty: no fault was planned. A
// fault that meets no request has no effect.
std::string faults_text(const OpenReplay& prepared, const RunSummary& summary);

// Returns the totals of the benchmark file that the run did not reach, one line each; empty: all
// were reached, or the file has none.
std::string missed_totals(const OpenReplay& prepared, const RunSummary& summary);

// Returns the JSON of the run: file, configuration, and the summary. `folder`: null without
// --hidden-states. `recorded`: absent unless the model decided on the inputs of a recording.
// `finding`: number in docs/findings.md of the run's failure; 0: none.
std::string summary_json(const ReplayOptions& options, const OpenReplay& prepared,
                         const RunSummary& summary, const HiddenStateFolder* folder,
                         const std::optional<RecordingCheck>& recorded, int finding);

// Verdicts in addition to that of the run.
struct OtherVerdicts {
  std::optional<RecordingCheck> recorded;  // of a recording on whose inputs the model decides
  std::unique_ptr<RecordingAudit> audit;   // of a recording that is followed
  std::span<const std::unique_ptr<RunAudit>> engines;  // of engines that decide
  std::optional<Failure> judged;                       // of a saved case that says what failed it

  // Why decisions that are not the model's were not audited; empty: they were. Null: the model
  // decided.
  const std::string* not_audited() const {
    if (audit != nullptr) return &audit->not_audited();
    return engines.empty() ? nullptr : &engines.front()->not_audited();
  }
  // True if a run compared something: pages, decisions by their audit, or a recording.
  bool has_compared(const RunSummary& summary) const {
    const std::string* reason = not_audited();
    return summary.request_steps > 0 &&
           (summary.backend != "none" || (reason != nullptr && reason->empty()) || recorded);
  }
};

// A run that parts from its recording has not failed; the difference is reported as text.
bool passes(Verdict verdict);

// Returns the verdict as text, with its newline.
std::string verdict_text(const RunSummary& summary, const OtherVerdicts& others);

}  // namespace lockstep
