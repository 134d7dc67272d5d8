#include "cli/replay_connector.h"

#include <fmt/format.h>

namespace lockstep {
namespace {

// Options that say more about a connector that is not there.
Result<void> check_alone(const ReplayOptions& options) {
  if (options.host_blocks) return fail("--host-blocks needs a host tier: --connector host");
  if (options.transfer_delay) return fail("--transfer-delay needs a host tier: --connector host");
  if (options.load_failures)
    return fail("--load-failures needs a connector whose loads may fail: --connector");
  if (options.load_failure_policy)
    return fail("--kv-load-failure-policy needs a connector whose loads may fail: --connector");
  return {};
}

}  // namespace

Result<ConnectorStart> start_connector(const ReplayOptions& options) {
  ConnectorStart start;
  ConnectorConfig& connector = start.connector;
  if (!options.connector) {
    if (auto sound = check_alone(options); !sound) return tl::unexpected(sound.error());
    start.hybrid_groups = !options.disable_hybrid_kv_cache_manager.value_or(false);
    return start;
  }
  const auto parts = connector_parts_from_text(*options.connector);
  if (!parts)
    return fail(
        fmt::format("--connector {}: expected peers, host or one-group-peers, or up to {} "
                    "of them joined by +",
                    *options.connector, kConnectorPartsMax));
  connector.parts = *parts;
  if (!connector.has(ConnectorKind::host) && (options.host_blocks || options.transfer_delay))
    return fail(fmt::format("{} is of a host tier: --connector host",
                            options.host_blocks ? "--host-blocks" : "--transfer-delay"));
  connector.load_failed_percent = options.load_failures;
  if (options.transfer_delay) connector.delay_steps_max = *options.transfer_delay;
  if (options.load_failure_policy == "fail")
    connector.load_failure_policy = KVLoadFailurePolicy::fail;
  if (options.mutant)
    if (const auto defect = multi_connector_defect_from_name(*options.mutant))
      connector.setup_defect = *defect;
  std::optional<bool> wants;
  if (options.disable_hybrid_kv_cache_manager) wants = !*options.disable_hybrid_kv_cache_manager;
  const Result<bool> hybrid = hybrid_groups_of(connector, wants);
  if (!hybrid)
    return fail(fmt::format("--connector {}: {}", *options.connector, hybrid.error().message));
  start.hybrid_groups = *hybrid;
  return start;
}

Result<void> finish_connector(const ReplayOptions& options, const ConnectorConfig& started,
                              LockstepConfig& config) {
  const ConnectorConfig planted = config.connector;
  ConnectorConfig& connector = config.connector;
  connector = started;
  connector.defect = planted.defect;
  connector.setup_defect = planted.setup_defect;
  if (connector.has(ConnectorKind::host)) {
    if (!config.engine.enable_prefix_caching)
      return fail("--connector host finds blocks by their hashes; leave --no-prefix-caching out");
    connector.num_host_blocks = options.host_blocks.value_or(config.device.plan.num_blocks);
  }
  return check_connector(connector, config.device.plan);
}

}  // namespace lockstep
