// Which KV connectors an engine has, and what is said about them: one, or several behind a
// MultiConnector, in the order in which they are asked.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "reference/types/kv_cache_spec.h"
#include "reference/types/kv_connector.h"
#include "sim/connectors/multi_connector.h"
#include "sim/connectors/offload_connector.h"
#include "traces/formats/run_spec.h"

namespace lockstep {

// As an engine's start sees it.
ConnectorClass class_of(ConnectorKind kind);

// What a spec says, and the mistakes that are planted.
struct ConnectorConfig : ConnectorSpec {
  ConnectorDefect defect = ConnectorDefect::none;  // of a host tier
  MultiConnectorDefect setup_defect = MultiConnectorDefect::none;
};

// In words: "peers that know prefixes of some prompts; 20 % of the loads fail". No connector:
// empty.
std::string connector_text(const ConnectorConfig& connector);

// What the engine's start asks, in its order, before there is a plan: whether several KV cache
// groups are handed to the connectors. `hybrid_groups`: what the user said of it.
Result<bool> hybrid_groups_of(const ConnectorConfig& connector, std::optional<bool> hybrid_groups);

// Refused: parts that there are not, too many of them, loads that fail in a cache of several
// groups, several groups for a part that takes one, and a defect where it changes nothing.
Result<void> check_connector(const ConnectorConfig& connector, const KVCacheConfig& plan);

// Host blocks that a backend needs for what a workload with this connector moves. Peers bring and
// take blocks under their own numbers.
std::int64_t num_host_blocks(ConnectorKind kind, const ConnectorConfig& connector,
                             const KVCacheConfig& plan);
std::int64_t num_host_blocks(const ConnectorConfig& connector, const KVCacheConfig& plan);

}  // namespace lockstep
