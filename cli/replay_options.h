// What `lockstep replay` can be told: the options of a run (traces/formats/run_fields.h), which file
// it takes and what it leaves behind.
#pragma once

#include <cstdint>
#include <string>

#include "traces/formats/run_fields.h"

namespace CLI {
class App;
}

namespace lockstep {

struct ReplayOptions {
  std::string file;
  // What is not given is chosen from the file (a trace's hints, a recording's header, a saved case)
  // or from the trace's own needs.
  GivenRun run;
  std::int64_t staging_blocks = 0;  // of a buffer that another engine's blocks go through

  // What it leaves behind; empty: nothing.
  std::string report_path, json_path, save_dir, cache_events_path, hidden_states_dir;
  bool shrink = false;  // what is saved, beside it
};

// Declares the options on `command`; `options` must outlive it.
void declare_replay_options(CLI::App& command, ReplayOptions& options);

}  // namespace lockstep
