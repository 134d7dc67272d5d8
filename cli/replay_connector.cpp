#include "cli/replay_connector.h"

#include <fmt/format.h>

namespace lockstep {
namespace {

// Options that say more about a connector that is not there.
Result<void> check_alone(const GivenRun& given) {
  if (given.has("host_blocks")) return fail("--host-blocks needs a host tier: --connector host");
  if (given.has("transfer_delay_steps"))
    return fail("--transfer-delay needs a host tier: --connector host");
  for (const char* name : {"load_failed_percent", "kv_load_failure_policy"})
    if (given.has(name))
      return fail(fmt::format("{} needs a connector whose loads may fail: --connector",
                              run_field(name).flag));
  return {};
}

}  // namespace

Result<bool> hybrid_groups_of(const GivenRun& given, const RunSpec& run) {
  std::optional<bool> wants;
  if (given.has("disable_hybrid_kv_cache_manager"))
    wants = !run.recipe.disable_hybrid_kv_cache_manager;
  if (!given.has("connector")) {
    if (auto sound = check_alone(given); !sound) return tl::unexpected(sound.error());
    return wants.value_or(true);
  }
  for (const char* name : {"host_blocks", "transfer_delay_steps"})
    if (given.has(name) && !run.connector.has(ConnectorKind::host))
      return fail(fmt::format("{} is of a host tier: --connector host", run_field(name).flag));
  ConnectorConfig connector;
  static_cast<ConnectorSpec&>(connector) = run.connector;
  if (!run.mutants.empty())
    if (const auto defect = multi_connector_defect_from_name(run.mutants.front()))
      connector.setup_defect = *defect;
  const Result<bool> hybrid = hybrid_groups_of(connector, wants);
  if (!hybrid)
    return fail(fmt::format("--connector {}: {}", connector_parts_text(run.connector.parts),
                            hybrid.error().message));
  return hybrid;
}

Result<void> size_host_tier(const GivenRun& given, RunSpec& run) {
  if (!run.connector.has(ConnectorKind::host)) return {};
  if (!run.engine.enable_prefix_caching)
    return fail("--connector host finds blocks by their hashes; leave --no-prefix-caching out");
  if (!given.has("host_blocks")) run.connector.num_host_blocks = run.cache.num_blocks;
  return {};
}

}  // namespace lockstep
