// What the workers of a workload's KV connector report with a step, once it is known that the
// scheduler can follow it.
#pragma once

#include "base/result.h"
#include "reference/types/kv_cache_spec.h"
#include "reference/types/kv_connector.h"
#include "sim/engine/decision_source.h"
#include "sim/engine/workload.h"

namespace lockstep {

// Nothing without a connector. Refused: a load that nobody waits for, a transfer of blocks that
// nobody keeps, blocks beyond the pool, invalid blocks of an engine with several groups (which vLLM
// cannot follow either).
Result<KVConnectorOutput> connector_report(Workload& workload, const DecisionSource& decisions,
                                           const KVCacheConfig& plan);

}  // namespace lockstep
