// The options of `lockstep replay` (those of a run of traces/formats/run_fields.h, its file, and
// what it leaves behind), and the session that they describe.
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
  std::vector<std::string> shards;  // that follow it
  GivenRun run;
  ImportOptions import;

  // What it leaves behind; empty: nothing.
  std::string report_path, perfetto_path, save_dir, cache_events_path, hidden_states_dir,
      facts_path, hashes_path;
  ReportOptions reports;
  std::int32_t jobs = 1;  // threads
  bool shrink = false;    // also saves the shrunk case
  double shrink_seconds = 0;
  DecisionsOptions decisions;
  WorkerOptions worker;
};

ReplayRequest request_of(const ReplayOptions& options);

// Takes the name of a bundled sample for a file that does not exist.
CLI::Validator sample_by_name();

// --import: how a file of another tool is to be read.
void declare_import(CLI::App& command, ImportOptions& options);

// Declares the options on `command`; `options` must outlive it.
void declare_replay_options(CLI::App& command, ReplayOptions& options);

// "auto", "cuda", "simt", a plugin's file; "none": null. Errors of the factory: a backend that this
// machine does not have, or that cannot do what the configuration asks for.
BackendFactory replay_backend(std::string name);

// The factory of the backend that a run names.
using BackendOf = std::function<Result<BackendFactory>(const PreparedReplay& prepared)>;

// A prepared replay with its session, which has taken `parts`, and its faults in `run`.
struct OpenReplay : PreparedReplay {
  std::unique_ptr<ConformingRun> conforming;      // looks on, with --conform
  std::vector<std::unique_ptr<HitCounter>> hits;  // per engine, where the model decides
  std::unique_ptr<Session> session;
};
// Errors: what prepare_replay(), the scheduler or a backend refuses, invalid faults. `engines`: the
// deciding engine; null: the model. `backend_of`: absent: replay_backend(). `conforms`: decisions
// of other engines are compared with the model.
Result<OpenReplay> open_replay(ReplayRequest request,
                               const std::shared_ptr<ForeignEngines>& engines = nullptr,
                               const BackendOf& backend_of = {}, bool conforms = false);

}  // namespace lockstep
