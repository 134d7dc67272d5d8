// A step-by-step record of a case up to its end or failure: arrivals, decisions, and which request
// holds each block. ExplanationKeeper observes the run and reads only public state, so the record
// cannot change what it explains.
//
// Invariants
// (1) The last step is the failing one, or the last one of the run.
// (2) Names, tokens and blocks come from the run; nothing is derived again from the case.
// (3) steps[i].recorded is the i-th step of the run's own recording: both lists have equal length.
// (4) With several data parallel ranks, the record covers the rank that fails, or else rank 0.
//
// Not included: the contents of the cache. A divergence has its own page
// (sim/verdict/divergence.h).
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

// The use of a block at the moment when its step has been decided and not yet executed.
struct BlockState {
  // held: in the table of at least one request. cached: unreferenced, but its hash is still
  // published, so a prefix hit may take it. `cached` needs the model's scheduler; another engine's
  // cached blocks show as free.
  enum class Kind : std::uint8_t { null_block, held, cached, free };
  Kind kind = Kind::free;
  std::vector<std::string> holders;  // requests in queue order; only of `held`
  bool operator==(const BlockState&) const = default;
};

// One step of the record: the decision in the recording's terms, and the tables and blocks around
// it.
struct ExplainedStep {
  RecordedStep recorded;             // the recorded form; a failing step may lack its output
  std::vector<std::string> arrived;  // live requests of this step that were not live before it
  // Live requests of the previous step that are not live now and were not reported as finished:
  // their clients disconnected.
  std::vector<std::string> gone;
  std::map<std::string, std::int64_t> known;  // prompt and accepted tokens, by live request
  std::vector<RecordedTable> tables;          // of all running requests
  std::vector<RecordedTable> waiting_tables;  // of waiting and ended requests that hold blocks
  // Tokens that fill each of waiting_tables: computed or loading. Another engine does not report
  // that number, so its entry is the request's known tokens instead.
  std::map<std::string, std::int64_t> loaded;
  std::vector<BlockState> pool;                 // indexed by block id
  std::map<std::string, std::int64_t> sampled;  // tokens that the step's output added, by request
  // Calls of reset_prefix_cache before the step.
};

struct Explanation {
  std::vector<ExplainedStep> steps;
  std::int32_t dp_size = 1;
  std::int32_t dp_rank = 0;  // data parallel rank of the steps
  Outcome outcome;
  std::optional<Divergence> divergence;      // present only for an outcome `divergence`
  std::vector<AuditFinding> findings;        // present only if the audit failed
  std::vector<StuckRequest> stuck;           // present only for an outcome `stuck`
  std::optional<RecordingCheck> recorded{};  // of a recording that supplied the run's inputs
};

// Collects the steps of one engine's run. It never ends the run.
//
// Invariants
// (1) live_ holds exactly the requests that were live when the keeper was last called.
// (2) Each decided() appends one step; finished() completes the last one.
class ExplanationKeeper final : public StepObserver {
 public:
  // `num_blocks`: of the pool, null block included.
  explicit ExplanationKeeper(std::int64_t num_blocks) : num_blocks_(num_blocks) {}
  bool decided(const StepView& view) override;
  bool finished(const StepView& view) override;
  // Ends the collection. The keeper is empty afterward.
  std::vector<ExplainedStep> take() { return std::move(steps_); }

 private:
  // Derives the use of every block from the tables of `step`. Time is linear in the blocks of the
  // pool, so a record of a large pool with many steps is large.
  std::vector<BlockState> pool_of(const StepView& view, const ExplainedStep& step);

  std::int64_t num_blocks_;
  std::map<std::string, std::int64_t> live_;  // tokens by request, at the last call
  std::vector<ExplainedStep> steps_;
};

// Writes the record as one JSON object, indented by two spaces, with a newline at the end. Bytes
// that are not UTF-8 are replaced, because engine messages may contain any byte.
std::string to_json(const SavedCase& saved, const Explanation& explanation);

// Judges the case under `options` and records it. The options' observer, observed rank, summary,
// findings and recording are replaced. With several data parallel ranks the case is judged twice:
// the first run finds the failing rank. REQUIRES: judging the case does not crash.
Explanation explain_judged(const SavedCase& saved, JudgeOptions options);
// As explain_judged(), with the model's decisions and `backend`, which may be absent.
Explanation explain(const SavedCase& saved, const BackendFactory& backend);

}  // namespace lockstep
