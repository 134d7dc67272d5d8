// A workload beside a KV connector: what arrives and is sampled is the workload's, what is
// elsewhere the connector's. Steps in which nothing runs go on while a transfer is under way.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "reference/engine_config.h"
#include "reference/kv_cache_spec.h"
#include "sim/connectors/offload_connector.h"
#include "sim/connectors/simulated_connector.h"
#include "sim/workload.h"

namespace lockstep {

enum class ConnectorKind : std::uint8_t {
  none,
  peers,  // unknown ones that know prefixes of some prompts: simulated_connector.h
  host,   // a host tier of this engine: offload_connector.h
};

std::string_view name_of(ConnectorKind kind);

struct ConnectorConfig {
  ConnectorKind kind = ConnectorKind::none;
  std::int64_t num_host_blocks = 0;      // host
  std::int32_t load_failed_percent = 0;  // host; peers lose blocks by themselves
  std::int32_t delay_steps_max = 3;      // host
  KVLoadFailurePolicy load_failure_policy = KVLoadFailurePolicy::recompute;
  ConnectorDefect defect = ConnectorDefect::none;  // host
};

// Host blocks that a backend needs for what a workload with this connector moves. Peers bring and
// take blocks under their own numbers.
std::int64_t num_host_blocks(const ConnectorConfig& connector, const KVCacheConfig& plan);

std::unique_ptr<Workload> connect(std::unique_ptr<Workload> inner, const ConnectorConfig& connector,
                                  const KVCacheConfig& plan, std::int32_t num_ranks,
                                  std::uint64_t seed);
std::unique_ptr<Workload> connect_peers(std::unique_ptr<Workload> inner,
                                        const SimulatedConnectorOptions& options);

}  // namespace lockstep
