// From options and a file to a run that is ready to start: who decides, what arrives, on which
// backend, with which configuration.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/result.h"
#include "cli/replay_options.h"
#include "sim/session/session.h"
#include "traces/formats/saved_case.h"
#include "traces/importers/benchmark_file.h"
#include "traces/importers/open_trace.h"

namespace lockstep {

struct PreparedReplay {
  FileFormat format = FileFormat::request_trace;
  RunSpec run;
  LockstepConfig config;  // of `run`
  SessionParts parts;
  std::unique_ptr<Session> session;
  std::int64_t num_records = 0;           // of the trace or recording; 0: not known
  std::vector<std::string> chosen;        // what was chosen here because nobody said
  std::optional<BenchmarkTotals> totals;  // that the run must arrive at
  std::optional<ExpectedVerdict> expected;
};

// Errors: a file that cannot be read, options that contradict it or one another.
Result<PreparedReplay> prepare_replay(const ReplayOptions& options);

// Its session, which takes the parts. Errors: what the scheduler refuses, faults that are none, a
// backend that this machine does not have.
Result<void> open_session(const ReplayOptions& options, PreparedReplay& prepared);

// Writes the run up to its end as a saved case into options.save_dir; its path.
Result<std::string> save_replay(const ReplayOptions& options, const PreparedReplay& prepared,
                                const RunReport& report);

}  // namespace lockstep
