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

namespace lockstep {

// The numbers are those of a saved case.
enum class ConnectorKind : std::uint8_t {
  peers = 1,  // unknown ones that know prefixes of some prompts: simulated_connector.h
  host = 2,   // a host tier of this engine: offload_connector.h
  // Peers that take one KV cache group, as the connectors of vLLM without SupportsHMA do; of
  // several they move the first.
  one_group_peers = 3,
};
std::string_view name_of(ConnectorKind kind);
// As an engine's start sees it.
ConnectorClass class_of(ConnectorKind kind);

inline constexpr std::size_t kConnectorPartsMax = 4;

struct ConnectorConfig {
  std::vector<ConnectorKind> parts;  // none: no connector
  std::int64_t num_host_blocks = 0;  // of each host tier
  // Of the loads; absent: as many as each kind loses by itself, which a host tier does not.
  std::optional<std::int32_t> load_failed_percent;
  std::int32_t delay_steps_max = 3;  // of a host tier
  KVLoadFailurePolicy load_failure_policy = KVLoadFailurePolicy::recompute;
  ConnectorDefect defect = ConnectorDefect::none;  // of a host tier
  MultiConnectorDefect setup_defect = MultiConnectorDefect::none;

  bool has(ConnectorKind kind) const;
};

// "peers+host": the parts in order. Nothing: a part that nobody knows, or too many.
std::optional<std::vector<ConnectorKind>> connector_parts_from_text(std::string_view text);
std::string connector_parts_text(const std::vector<ConnectorKind>& parts);  // none: "none"
// The same as one number, a digit a part; 0: none. What check_connector() refuses is kept.
std::vector<ConnectorKind> connector_parts_from_number(std::int64_t number);
std::int64_t connector_parts_number(const std::vector<ConnectorKind>& parts);

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
