// A workload beside KV connectors: what arrives and is sampled is the workload's, what is elsewhere
// the connectors'. Steps in which nothing runs go on while a transfer is under way.
#pragma once

#include <cstdint>
#include <memory>

#include "reference/types/engine_config.h"
#include "reference/types/kv_cache_spec.h"
#include "sim/connectors/connector_config.h"
#include "sim/connectors/simulated_connector.h"
#include "sim/engine/workload.h"

namespace lockstep {

// Several parts are asked as a MultiConnector (multi_connector.h). Without a part: `inner`.
std::unique_ptr<Workload> connect(std::unique_ptr<Workload> inner, const ConnectorConfig& connector,
                                  const EngineConfig& engine, const KVCacheConfig& plan,
                                  std::int32_t num_ranks, std::uint64_t seed);
// Of the connectors of a data parallel rank: each has its own. The first, or only one: the run's.
std::uint64_t connector_seed(std::uint64_t seed, std::int32_t dp_rank);
std::unique_ptr<Workload> connect_peers(std::unique_ptr<Workload> inner,
                                        const SimulatedConnectorOptions& options);

}  // namespace lockstep
