// A step-by-step record of a case, up to its end or failure: arrivals, decisions, and which request
// holds each block. Gathered from public state while the judge runs the case.
//
// Invariants
// (1) The last step is the one that failed, or the last one of the run.
// (2) Names, tokens and blocks are those of the run; nothing is derived again from the case.
// (3) Of several engines, it shows the one that fails, or else the first.
//
// Not shown: the content of the cache. A divergence brings its page (sim/verdict/divergence.h).
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "properties/audit/audit.h"
#include "properties/judge/judge.h"
#include "properties/judge/recording_check.h"
#include "sim/engine/step_observer.h"
#include "traces/formats/recording.h"
#include "traces/formats/saved_case.h"

namespace lockstep {

// What a block is when a step has been decided.
struct BlockState {
  enum class Kind : std::uint8_t { null_block, held, cached, free };
  Kind kind = Kind::free;
  std::vector<std::string> holders;  // requests, in queue order
  bool operator==(const BlockState&) const = default;
};

struct StoryStep {
  RecordedStep recorded;             // as a recording tells it, as far as the step came
  std::vector<std::string> arrived;  // first seen in this step
  // seen in the previous step, and not reported as finished
  std::vector<std::string> gone;
  std::map<std::string, std::int64_t> known;  // prompt and sampled tokens of the live
  std::vector<RecordedTable> tables;          // of all that run
  std::vector<RecordedTable> waiting_tables;  // of those that hold blocks and do not
  // Tokens computed, or loading, of those; where another engine decides, all that they have.
  std::map<std::string, std::int64_t> loaded;
  std::vector<BlockState> pool;                 // by block
  std::map<std::string, std::int64_t> sampled;  // tokens that the step's output added
  std::int64_t resets = 0;
};

struct Story {
  std::vector<StoryStep> steps;
  std::int32_t dp_size = 1;
  std::int32_t dp_rank = 0;  // that the steps are of
  Outcome outcome;
  std::optional<Divergence> divergence;      // of an outcome `divergence`
  std::vector<AuditFinding> findings;        // of a violation that the audit found
  std::vector<StuckRequest> stuck;           // of an outcome `stuck`
  std::optional<RecordingCheck> recorded{};  // of a recording, whose inputs the steps have
};

class StoryKeeper final : public StepObserver {
 public:
  explicit StoryKeeper(std::int64_t num_blocks) : num_blocks_(num_blocks) {}
  bool decided(const StepView& view) override;
  bool finished(const StepView& view) override;
  std::vector<StoryStep> take() { return std::move(steps_); }

 private:
  std::vector<BlockState> pool_of(const StepView& view, const StoryStep& step);

  std::int64_t num_blocks_;
  std::map<std::string, std::int64_t> live_;  // known tokens after the last step
  std::vector<StoryStep> steps_;
};

// The record as one JSON object.
std::string to_json(const SavedCase& saved, const Story& story);

// Judges the case and records it. REQUIRES: a case that does not crash. Judged by `options`, whose
// observer and other receivers are replaced.
Story tell_judged(const SavedCase& saved, JudgeOptions options);
Story tell(const SavedCase& saved, const BackendFactory& backend);

}  // namespace lockstep
