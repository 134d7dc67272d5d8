// The options of `lockstep replay`, and the session that they describe. Options of a run come from
// the table in traces/formats/run_fields.h; the rest are the input, the outputs, the deciding
// engine and the worker.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/result.h"
#include "cli/options/decisions_option.h"
#include "cli/options/worker_option.h"
#include "cli/output/reports.h"
#include "properties/judge/recording_check.h"
#include "sim/conform/conform.h"
#include "sim/setup/replay_setup.h"

namespace CLI {
class App;
class Validator;
}  // namespace CLI

namespace lockstep {

struct ReplayOptions {
  std::string file;
  std::string from;                 // engine that builds the layers of run.recipe.model
  std::vector<std::string> shards;  // further files of a trace, in order
  GivenRun run;
  ImportOptions import;

  // Outputs; empty: not written.
  std::string report_path, perfetto_path, save_dir, cache_events_path, hidden_states_dir,
      facts_path, hashes_path;
  ReportOptions reports;
  std::int32_t jobs = 1;      // threads
  bool shrink = false;        // also saves the shrunk case
  double shrink_seconds = 0;  // time limit for shrinking; 0: none
  DecisionsOptions decisions;
  WorkerOptions worker;
};

// Returns what prepare_replay() needs of the options.
ReplayRequest request_of(const ReplayOptions& options);

// Replaces the name of a bundled sample by its path, if no file of that name exists. Never refuses:
// the reader reports a missing file.
CLI::Validator sample_by_name();

// Declares --import: how a file of another tool is read.
void declare_import(CLI::App& command, ImportOptions& options);

// Declares the options on `command`; `options` must outlive it.
void declare_replay_options(CLI::App& command, ReplayOptions& options);

// Returns the first given option that a command of two engines ignores: another engine's decisions
// or worker, and outputs of one run. Empty: none is given.
std::string given_for_one_engine(const ReplayOptions& options);

// Returns the factory of a backend: "auto", "cuda", "simt", "none", the user's kernels, or an
// engine's worker. "auto" is the GPU if this machine has one and no option needs the CPU executor.
// The factory returns null for "none". Errors of the factory: a backend that this machine does not
// have, or that does not support the configuration.
BackendFactory replay_backend(std::string name);

// Returns the factory of the backend that a run names.
using BackendOf = std::function<Result<BackendFactory>(const PreparedReplay& prepared)>;

// A prepared replay with its session. The session has taken `parts`; `run` has the planned faults.
struct OpenReplay : PreparedReplay {
  std::unique_ptr<ConformingRun> conforming;  // null without --conform
  // One per engine: of another engine's decisions, or of the model's hits. Empty: none.
  std::vector<std::unique_ptr<RunAudit>> audits;
  std::unique_ptr<Session> session;
};
// Opens a replay. `engines`: the deciding engine; null: the model. `backend_of`: absent:
// replay_backend(). `conforms`: compares the engine's decisions with the model's, in a run of one
// engine. `rules`: of the engine's audit. Errors: what prepare_replay(), the scheduler or a backend
// refuses, and invalid faults.
Result<OpenReplay> open_replay(ReplayRequest request,
                               const std::shared_ptr<ForeignEngines>& engines = nullptr,
                               const BackendOf& backend_of = {}, bool conforms = false,
                               AuditedRules rules = AuditedRules::all);

}  // namespace lockstep
