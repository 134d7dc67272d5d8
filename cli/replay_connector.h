// The KV connectors of a replay, from its options: unknown peers, host tiers, or several of both.
#pragma once

#include <string>

#include "base/result.h"
#include "sim/connectors/connector_config.h"
#include "traces/formats/run_fields.h"

namespace lockstep {

// Before there is a plan: whether the engine may give its connectors several KV cache groups.
// Refused: options that need a connector or another one, several groups that the user insists on
// and a part does not take.
Result<bool> hybrid_groups_of(const GivenRun& given, const RunSpec& run);

// With the plan: a host tier is as large as the pool unless --host-blocks says more. Refused: a
// tier without prefix caching, whose block hashes are its keys.
Result<void> size_host_tier(const GivenRun& given, RunSpec& run);

}  // namespace lockstep
