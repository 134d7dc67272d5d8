// The KV connectors of an engine: one, or several behind a MultiConnector, in query order. And a
// workload with them: arrivals and samples come from the workload, remote caches from the
// connectors. Empty steps continue while a transfer is in flight.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "base/result.h"
#include "reference/profiles/compatibility.h"
#include "reference/types/engine_config.h"
#include "reference/types/kv_cache_spec.h"
#include "sim/connectors/multi_connector.h"
#include "sim/connectors/offload_connector.h"
#include "sim/connectors/simulated_connector.h"
#include "sim/engine/workload.h"
#include "traces/formats/run_spec.h"

namespace lockstep {

// As an engine's start sees it.
ConnectorClass class_of(ConnectorKind kind);

// What a spec says, and the mistakes that are planted.
struct ConnectorConfig : ConnectorSpec {
  ConnectorDefect defect = ConnectorDefect::none;  // of a host tier
  MultiConnectorDefect setup_defect = MultiConnectorDefect::none;
};

// "peers that know prefixes of some prompts; 20 % of the loads fail"; empty: no connector.
std::string connector_text(const ConnectorConfig& connector);

// What the engine's start asks, in its order, before there is a plan: whether several KV cache
// groups are handed to the connectors. `hybrid_groups`: what the user said of it.
Result<bool> hybrid_groups_of(const ConnectorConfig& connector, std::optional<bool> hybrid_groups);

// What the table of compatibility.h reads of it.
RunTraits connector_traits(const ConnectorConfig& config);
// Refused: too many parts, groups of host pages of another shape, a defect that changes nothing.
Result<void> check_connector(const ConnectorConfig& connector, const KVCacheConfig& plan);

// Host blocks that a backend needs for what a workload with this connector moves. Peers bring and
// take blocks under their own numbers.
std::int64_t num_host_blocks(ConnectorKind kind, const ConnectorConfig& connector,
                             const KVCacheConfig& plan);
// All of them, behind those of the host pool.
std::int64_t num_host_blocks(const ConnectorConfig& connector, const EngineConfig& engine,
                             const KVCacheConfig& plan);

// Several parts are queried as a MultiConnector (multi_connector.h). Without a part: `inner`.
std::unique_ptr<Workload> connect(std::unique_ptr<Workload> inner, const ConnectorConfig& connector,
                                  const EngineConfig& engine, const KVCacheConfig& plan,
                                  std::int32_t num_ranks, std::uint64_t seed);
// Of the connectors of a data parallel rank: each has its own. The first, or only one: the run's.
std::uint64_t connector_seed(std::uint64_t seed, std::int32_t dp_rank);
std::unique_ptr<Workload> connect_peers(std::unique_ptr<Workload> inner,
                                        const SimulatedConnectorOptions& options);

}  // namespace lockstep
