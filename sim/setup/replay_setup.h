// From a file and its options to a run that is ready to start: its spec, its configuration and its
// arrivals. Options that are not given are taken from the file (a trace's hints, a recording's
// header, a saved case) or derived from the trace.
//
// Invariants
// (1) A given option wins over a hint of the file, and a hint over a default. A recording,
//     benchmark or saved case fixes its configuration; options that contradict it are refused,
//     never ignored.
// (2) Every value that was chosen without an option is listed in PreparedReplay::chosen.
// (3) A prepared replay has passed check_setup().
//
// Not here: backends, faults of the command line, and the run itself (sim/session/session.h).
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

// What the user has requested.
struct ReplayRequest {
  std::string file;
  GivenRun run;
  ImportOptions import{};
  std::int64_t staging_blocks = 0;  // host blocks for transfers between two engines
  bool tells_cache_events = false;
  std::int32_t num_threads = 1;  // BackendConfig::num_threads
  bool draws = false;            // LockstepConfig::draw
  bool saves = false;            // a failing run is written as a saved case
  bool other_engine = false;     // another engine decides, not the model
  bool as_served = false;        // a trace's run takes the release's defaults (model_spec.h)
};

// A parsed file. Exactly one pointer is set, except that a benchmark also has its trace.
struct ReplayInput {
  FileFormat format = FileFormat::request_trace;
  std::shared_ptr<const Trace> trace;  // limited to RunRecipe's limit_requests
  std::shared_ptr<const BenchmarkFile> benchmark;
  std::shared_ptr<const Recording> recording;
  std::shared_ptr<const SavedCase> saved;
  std::vector<std::string> assumed;  // values that the trace's reader assumed
};

// A run that is ready to start, and what its report shows about its origin.
struct PreparedReplay {
  FileFormat format = FileFormat::request_trace;
  RunSpec run;
  LockstepConfig config;                       // config_of(run)
  SessionParts parts;                          // without backends and faults
  std::shared_ptr<const Trace> trace;          // the arrivals; null: a recording, or a saved case
  std::shared_ptr<const Recording> recording;  // the file, if it is one
  std::int64_t num_records = 0;                // of the trace or recording; 0: unknown
  std::string cut_off;                         // cut_off_text() of a recording
  std::vector<std::string> chosen;             // invariant (2), one line each
  std::vector<ServedOption> served;            // ReplayRequest::as_served
  std::optional<BenchmarkTotals> totals;       // a benchmark's totals, which the run must reach
  std::optional<ExpectedVerdict> expected;
  std::optional<RecordedEngine> decided_by;  // of a saved case
  std::optional<WorkedBy> worked_by;         // of a saved case
};

// Detects the format and parses the file. Errors: a file that cannot be read.
Result<ReplayInput> read_input(const ReplayRequest& request);
// Turns a parsed file and the options into a run. Errors: options that contradict the file or one
// another, and unsupported combinations (reference/profiles/compatibility.h).
Result<PreparedReplay> resolve_replay(ReplayRequest request, const ReplayInput& input);
// read_input(), then resolve_replay().
Result<PreparedReplay> prepare_replay(const ReplayRequest& request);

// Returns the profile whose memory a recording is replayed in: its engine's own, or the default
// profile if that engine has none.
std::string profile_for_memory(const RecordingHeader& header);

// A saved case fixes the run: only the backend, its check mode and another decider may be given.
Result<void> check_options_of_saved_case(const ReplayRequest& request);
// Refuses the file of an engine without a profile: the model cannot make its decisions.
Result<void> check_profile(const std::string& path, const std::string& engine);

// Returns the run up to its end as a saved case. REQUIRES: the file was not a saved case.
SavedCase case_of(const ReplayRequest& request, const PreparedReplay& prepared,
                  const RunReport& report);

}  // namespace lockstep
