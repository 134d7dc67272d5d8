// The end of a replay, for a person and as JSON.
#pragma once

#include <string>

#include "cli/hidden_state_folder.h"
#include "cli/replay_options.h"
#include "cli/replay_setup.h"
#include "sim/engine/step_observer.h"

namespace lockstep {

// What runs, before it runs: engine, cache, device. One sentence each, with newlines.
std::string configuration_text(const PreparedReplay& prepared);

// The figures, what was not checked, the verdict. A newline at the end.
std::string summary_text(const RunSummary& summary);

// What was made to go wrong, and how often it did; empty: nothing.
std::string faults_text(const PreparedReplay& prepared, const RunSummary& summary);

// Where the run missed the totals of its benchmark file; empty: nowhere, or there are none.
std::string missed_totals(const PreparedReplay& prepared, const RunSummary& summary);

// The summary's JSON with `file` and `configuration` put in front. `folder` may be null.
std::string summary_json(const ReplayOptions& options, const PreparedReplay& prepared,
                         const RunSummary& summary, const HiddenStateFolder* folder);

}  // namespace lockstep
