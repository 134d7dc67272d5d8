// What a prepared replay gets from the command: backends by their names, faults of a seed, and with
// them its session.
#pragma once

#include <memory>
#include <string>

#include "base/result.h"
#include "sim/setup/replay_setup.h"

namespace lockstep {

// "auto", "cuda", "simt", a plugin's file; "none": null. Errors of the factory: a backend that this
// machine does not have, or that cannot do what the configuration asks for.
BackendFactory replay_backend(std::string name);

// With its session, which has taken `parts`, and its faults in `run`.
struct OpenReplay : PreparedReplay {
  std::unique_ptr<Session> session;
};
// Errors: what prepare_replay(), the scheduler or a backend refuses, faults that are none.
Result<OpenReplay> open_replay(const ReplayRequest& request);

}  // namespace lockstep
