// Builds the KV connectors of an engine from their spec: one, or several in a MultiConnector, in
// query order. Wraps a workload with them: arrivals and samples come from the workload, remote
// caches from the connectors. Empty steps continue while a transfer is in flight.
//
// Not here: how a connector behaves (simulated_connector.h, offload_connector.h) and how several
// are combined (multi_connector.h).
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

// Returns the connector class as an engine's start-up sees it: its name and whether it supports
// several KV cache groups.
ConnectorClass class_of(ConnectorKind kind);

// A spec with the defects that are planted in it.
struct ConnectorConfig : ConnectorSpec {
  ConnectorDefect defect = ConnectorDefect::none;  // in a host tier
  MultiConnectorDefect setup_defect = MultiConnectorDefect::none;
};

// Describes the connectors for a person: "peers that know prefixes of some prompts; 20 % of the
// loads fail". Empty: no connector.
std::string connector_text(const ConnectorConfig& connector);

// Decides, as the engine's start-up does before any plan exists, whether the connectors receive
// several KV cache groups. `hybrid_groups`: the user's choice; absent: the engine's. Errors: the
// user requires several groups and a connector does not support them.
Result<bool> hybrid_groups_of(const ConnectorConfig& connector, std::optional<bool> hybrid_groups);

// Returns the traits by which reference/profiles/compatibility.h refuses combinations.
RunTraits connector_traits(const ConnectorConfig& config);
// Refuses too many parts, groups of host pages of another shape, and a planted defect that changes
// nothing in this run.
Result<void> check_connector(const ConnectorConfig& connector, const KVCacheConfig& plan);

// Returns the host blocks that a backend needs for one connector. A host tier has its own size.
// Peers use one host block per block of the pool, under the same number; page workers use the host
// pool.
std::int64_t num_host_blocks(ConnectorKind kind, const ConnectorConfig& connector,
                             const KVCacheConfig& plan);
// Returns the host blocks of all connectors together, after those of the host pool. Example: pool
// of 100 blocks, connectors "peers+host" with a tier of 32, no host pool: 132.
std::int64_t num_host_blocks(const ConnectorConfig& connector, const EngineConfig& engine,
                             const KVCacheConfig& plan);

// Wraps `inner` with the connectors of the spec; returns `inner` unchanged if there are none.
// Several connectors are queried as a MultiConnector (multi_connector.h). `num_ranks`: ranks of
// context parallelism that share the tokens of a block.
std::unique_ptr<Workload> connect(std::unique_ptr<Workload> inner, const ConnectorConfig& connector,
                                  const EngineConfig& engine, const KVCacheConfig& plan,
                                  std::int32_t num_ranks, std::uint64_t seed);
// Returns the seed of a data parallel rank's connectors, since each rank has its own. Rank 0, or an
// engine without ranks (-1), has the run's seed.
std::uint64_t connector_seed(std::uint64_t seed, std::int32_t dp_rank);
// Wraps `inner` with one peer connector of explicit options: for tests and fuzzers without a plan.
std::unique_ptr<Workload> connect_peers(std::unique_ptr<Workload> inner,
                                        const SimulatedConnectorOptions& options);

}  // namespace lockstep
