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
#include "sim/engine/faulty_workload.h"
#include "sim/engine/lockstep.h"
#include "sim/ranks/dealt_workload.h"
#include "traces/formats/saved_case.h"
#include "traces/importers/benchmark_file.h"
#include "traces/importers/open_trace.h"

namespace lockstep {

struct PreparedEngine {
  // Of several: what is dealt out to it, with its connector and its faults in between; else null.
  std::unique_ptr<Workload> workload;
  DealtWorkload* dealt = nullptr;
  std::unique_ptr<DecisionSource> decisions;
  const FaultyWorkload* faulty = nullptr;  // when there are faults
  // One for each rank that has memory of its own; none: the model alone.
  std::vector<std::unique_ptr<Backend>> ranks;
};

struct PreparedReplay {
  FileFormat format = FileFormat::request_trace;
  RunSpec run;
  LockstepConfig config;                // of `run`
  std::vector<PreparedEngine> engines;  // one for each data parallel rank
  std::unique_ptr<Workload> workload;   // all that arrives; of one engine, as it is given to it
  std::vector<BlockId> free_order;      // of a saved case that says so; empty: the engine's
  TraceWorkloadOptions workload_options;
  std::int64_t num_records = 0;           // of the trace or recording; 0: not known
  std::vector<std::string> chosen;        // what was chosen here because nobody said
  std::optional<BenchmarkTotals> totals;  // that the run must arrive at
  std::optional<ExpectedVerdict> expected;
};

// Errors: a file that cannot be read, options that contradict it or one another, a backend that
// this machine does not have.
Result<PreparedReplay> prepare_replay(const ReplayOptions& options);

// Writes the run up to its end as a saved case into options.save_dir; its path.
Result<std::string> save_replay(const ReplayOptions& options, const PreparedReplay& prepared,
                                const RunReport& report);

}  // namespace lockstep
