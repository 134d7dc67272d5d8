// The KV connectors of a replay, from its options: unknown peers, host tiers, or several of both.
#pragma once

#include <string>

#include "base/result.h"
#include "cli/replay_options.h"
#include "sim/session/session.h"

namespace lockstep {

// Before there is a plan: the parts, and whether the engine may give them several KV cache groups.
// Refused: parts that nobody knows, options that need a connector or another one, several groups
// that the user insists on and a part does not take.
struct ConnectorStart {
  ConnectorConfig connector;
  bool hybrid_groups = true;
};
Result<ConnectorStart> start_connector(const ReplayOptions& options);

// With the plan: a host tier is as large as the pool unless --host-blocks says more. Refused: a
// tier without prefix caching, whose block hashes are its keys, and what check_connector() refuses.
Result<void> finish_connector(const ReplayOptions& options, const ConnectorConfig& started,
                              LockstepConfig& config);

}  // namespace lockstep
