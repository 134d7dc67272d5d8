// Whether a report of a KV connector's workers is one that the scheduler can follow.
#pragma once

#include "reference/kv_cache_spec.h"
#include "reference/kv_connector.h"
#include "reference/result.h"
#include "sim/decision_source.h"

namespace lockstep {

// Refused: a load that nobody waits for, a transfer of blocks that nobody keeps, blocks beyond the
// pool, invalid blocks of an engine with several groups (which vLLM cannot follow either).
Result<void> check_connector_report(const KVConnectorOutput& report,
                                    const DecisionSource& decisions, const KVCacheConfig& plan);

}  // namespace lockstep
