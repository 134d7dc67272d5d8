// From a file and its options to a run that is ready to start: its spec, with unset options chosen
// from the file (a trace's hints, a recording's header, a saved case) or the trace's own needs; its
// configuration; its arrivals.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/result.h"
#include "sim/session/session.h"
#include "sim/setup/planned_cache.h"
#include "traces/formats/run_fields.h"
#include "traces/formats/saved_case.h"
#include "traces/importers/foreign_traces.h"
#include "traces/importers/open_trace.h"

namespace lockstep {

struct ReplayRequest {
  std::string file;
  GivenRun run;
  ImportOptions import{};
  std::int64_t staging_blocks = 0;  // of a buffer that another engine's blocks go through
  bool tells_cache_events = false;
  std::int32_t num_threads = 1;  // BackendConfig::num_threads
  bool draws = false;            // LockstepConfig::draw
  bool saves = false;
  bool other_engine = false;  // decides, not the model
  bool as_served = false;     // a trace's run takes the release's defaults (model_spec.h)
};

// A file, read once: one of the pointers is set.
struct ReplayInput {
  FileFormat format = FileFormat::request_trace;
  std::shared_ptr<const Trace> trace;  // its requests, limited as the run is
  std::shared_ptr<const BenchmarkFile> benchmark;
  std::shared_ptr<const Recording> recording;
  std::shared_ptr<const SavedCase> saved;
  std::vector<std::string> assumed;  // by the reader of the trace
};

struct PreparedReplay {
  FileFormat format = FileFormat::request_trace;
  RunSpec run;
  LockstepConfig config;                       // of `run`
  SessionParts parts;                          // without backends and faults
  std::shared_ptr<const Trace> trace;          // that arrives; null: a recording, or a saved case
  std::shared_ptr<const Recording> recording;  // the file, if it is one
  std::int64_t num_records = 0;                // of the trace or recording; 0: not known
  std::string cut_off;                         // of a recording, as cut_off_text()
  std::vector<std::string> chosen;             // what was chosen here, as it was not given
  std::vector<ServedOption> served;            // of a trace that is run as its release serves
  std::optional<BenchmarkTotals> totals;       // that the run must arrive at
  std::optional<ExpectedVerdict> expected;
  std::optional<RecordedEngine> decided_by;  // of a saved case
  std::optional<WorkedBy> worked_by;         // of a saved case
};

// Detects the format and parses the file. Errors: a file that cannot be read.
Result<ReplayInput> read_input(const ReplayRequest& request);
// Errors: options that contradict the file or one another, and what does not go together
// (reference/profiles/compatibility.h).
Result<PreparedReplay> resolve_replay(ReplayRequest request, const ReplayInput& input);
// Both.
Result<PreparedReplay> prepare_replay(const ReplayRequest& request);

// The profile whose memory a recording is followed in: its engine's own, or the default where that
// has none.
std::string profile_for_memory(const RecordingHeader& header);

// Refused: the file of an engine without a profile, whose decisions the model cannot make.
Result<void> check_profile(const std::string& path, const std::string& engine);

// The run up to its end as a saved case. REQUIRES: it was none before.
SavedCase case_of(const ReplayRequest& request, const PreparedReplay& prepared,
                  const RunReport& report);

}  // namespace lockstep
