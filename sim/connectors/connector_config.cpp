#include "sim/connectors/connector_config.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <utility>

#include "base/check.h"

namespace lockstep {
namespace {

// One that says what it lacks.
Result<void> check_defects(const ConnectorConfig& connector, const KVCacheConfig& plan) {
  if (connector.defect != ConnectorDefect::none && !connector.has(ConnectorKind::host))
    return fail(fmt::format("mutant: {} is planted in a host tier; add --connector host",
                            name_of(connector.defect)));
  if (connector.setup_defect == MultiConnectorDefect::none) return {};
  const bool shows = connector.setup_defect == MultiConnectorDefect::hma_any &&
                     connector.has(ConnectorKind::one_group_peers) && plan.groups.size() > 1;
  if (shows) return {};
  return fail(fmt::format(
      "mutant: {} changes nothing here; it is planted in how an engine starts that has {}",
      name_of(connector.setup_defect),
      connector.setup_defect == MultiConnectorDefect::hma_any
          ? "several KV cache groups (--model) and --connector one-group-peers+host"
          : "--connector host alone"));
}

std::string part_text(ConnectorKind kind, const ConnectorConfig& connector) {
  if (kind == ConnectorKind::host)
    return fmt::format("a host tier of {} block{}, transfers up to {} step{} late",
                       connector.num_host_blocks, connector.num_host_blocks == 1 ? "" : "s",
                       connector.delay_steps_max, connector.delay_steps_max == 1 ? "" : "s");
  return kind == ConnectorKind::peers ? "peers that know prefixes of some prompts"
                                      : "peers that know prefixes and take one KV cache group";
}

}  // namespace

ConnectorClass class_of(ConnectorKind kind) {
  return {.name = kind == ConnectorKind::host ? "OffloadingConnector" : std::string(name_of(kind)),
          .supports_hybrid_groups = kind != ConnectorKind::one_group_peers};
}

std::string connector_text(const ConnectorConfig& connector) {
  if (connector.parts.empty()) return {};
  std::string text;
  for (const ConnectorKind kind : connector.parts)
    text += (text.empty() ? "" : "; then ") + part_text(kind, connector);
  if (connector.load_failed_percent)
    text += fmt::format("; {} % of the loads fail", *connector.load_failed_percent);
  return text;
}

// A host tier alone is what the engine's own offloading sets up; nobody names its connector.
Result<bool> hybrid_groups_of(const ConnectorConfig& connector, std::optional<bool> hybrid_groups) {
  MultiConnectorConfig config{.connectors = {}, .offloads = false, .hybrid_groups = hybrid_groups};
  if (connector.parts == std::vector{ConnectorKind::host})
    config.offloads = true;
  else
    for (const ConnectorKind kind : connector.parts) config.connectors.push_back(class_of(kind));
  const auto setup = set_up_connectors(config, connector.setup_defect);
  if (!setup) return tl::unexpected(setup.error());
  return setup->hybrid_groups && hybrid_groups.value_or(true);
}

Result<void> check_connector(const ConnectorConfig& connector, const KVCacheConfig& plan) {
  if (connector.parts.size() > kConnectorPartsMax)
    return fail(fmt::format("connector: {} parts; expected {} at most", connector.parts.size(),
                            kConnectorPartsMax));
  if (connector.load_failed_percent.value_or(0) > 0 && plan.groups.size() != 1)
    return fail(
        "--load-failures (load_failed_percent): vLLM assigns lost blocks of several KV cache "
        "groups to no request; give "
        "a cache of one group");
  if (auto sound = check_defects(connector, plan); !sound) return sound;
  if (connector.has(ConnectorKind::one_group_peers) && plan.groups.size() > 1 &&
      connector.setup_defect != MultiConnectorDefect::hma_any)
    return fail(fmt::format("connector: one-group-peers take one KV cache group, and there are {}",
                            plan.groups.size()));
  return {};
}

std::int64_t num_host_blocks(ConnectorKind kind, const ConnectorConfig& connector,
                             const KVCacheConfig& plan) {
  return kind == ConnectorKind::host ? connector.num_host_blocks : plan.num_blocks;
}

// A connector that is not of this configuration, a recorded one, has unknown peers.
std::int64_t num_host_blocks(const ConnectorConfig& connector, const KVCacheConfig& plan) {
  if (connector.parts.empty()) return plan.num_blocks;
  std::int64_t sum = 0;
  for (const ConnectorKind kind : connector.parts) sum += num_host_blocks(kind, connector, plan);
  return sum;
}

}  // namespace lockstep
