// The KV connector of a replay, from its options: unknown peers, or a host tier.
#pragma once

#include "cli/replay_options.h"
#include "reference/result.h"
#include "sim/lockstep.h"

namespace lockstep {

// Refused: options that need a connector, or another one; a host tier without prefix caching, whose
// block hashes are its keys. Without --host-blocks a tier is as large as the pool.
Result<void> read_connector(const ReplayOptions& options, LockstepConfig& config);

// One line for a person; empty without a connector.
std::string connector_text(const ConnectorConfig& connector);

}  // namespace lockstep
