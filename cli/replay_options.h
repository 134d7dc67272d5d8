// The options of `lockstep replay`: those of a run (traces/formats/run_fields.h), its file, and
// what it leaves behind.
#pragma once

#include <string>

#include "sim/setup/replay_setup.h"

namespace CLI {
class App;
}

namespace lockstep {

struct ReplayOptions {
  std::string file;
  GivenRun run;

  // What it leaves behind; empty: nothing.
  std::string report_path, json_path, save_dir, cache_events_path, hidden_states_dir;
  bool shrink = false;  // what is saved, beside it
};

ReplayRequest request_of(const ReplayOptions& options);

// Declares the options on `command`; `options` must outlive it.
void declare_replay_options(CLI::App& command, ReplayOptions& options);

}  // namespace lockstep
