#include "cli/replay_connector.h"

#include <fmt/format.h>

#include "cli/terminal.h"

namespace lockstep {
namespace {

// Of options that say more about a connector: the first that was given; empty: none.
std::string first_of_host(const ReplayOptions& options) {
  if (options.host_blocks) return "--host-blocks";
  if (options.load_failures) return "--load-failures";
  if (options.transfer_delay) return "--transfer-delay";
  return {};
}

}  // namespace

Result<void> read_connector(const ReplayOptions& options, LockstepConfig& config) {
  ConnectorConfig& connector = config.connector;
  const std::string given = first_of_host(options);
  if (!options.connector) {
    if (options.load_failure_policy)
      return fail("--kv-load-failure-policy needs a connector whose loads may fail: --connector");
    if (!given.empty()) return fail(given + " needs a host tier: --connector host");
    return {};
  }
  if (options.load_failure_policy == "fail")
    connector.load_failure_policy = KVLoadFailurePolicy::fail;
  if (*options.connector == "peers") {
    connector.kind = ConnectorKind::peers;
    if (!given.empty()) return fail(given + " is of a host tier: --connector host");
    return {};
  }
  if (!config.engine.enable_prefix_caching)
    return fail("--connector host finds blocks by their hashes; leave --no-prefix-caching out");
  connector.kind = ConnectorKind::host;
  connector.num_host_blocks = options.host_blocks.value_or(config.device.plan.num_blocks);
  connector.load_failed_percent = options.load_failures.value_or(connector.load_failed_percent);
  connector.delay_steps_max = options.transfer_delay.value_or(connector.delay_steps_max);
  if (connector.load_failed_percent > 0 && config.device.plan.groups.size() != 1)
    return fail(
        "--load-failures: vLLM assigns lost blocks of several KV cache groups to no request; give "
        "a cache of one group");
  return {};
}

std::string connector_text(const ConnectorConfig& connector) {
  switch (connector.kind) {
    case ConnectorKind::none:
      return {};
    case ConnectorKind::peers:
      return "peers that know prefixes of some prompts";
    case ConnectorKind::host:
      return fmt::format("a host tier of {}, transfers up to {} late, {} % of the loads fail",
                         counted(connector.num_host_blocks, "block"),
                         counted(connector.delay_steps_max, "step"), connector.load_failed_percent);
  }
  return {};
}

}  // namespace lockstep
