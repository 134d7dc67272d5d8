// KV connectors of generated cases: peers that know prefixes of some prompts, or a host tier with a
// few blocks or many, quick or late transfers, and loads that fail; and several of them behind one.
#include <algorithm>

#include "properties/generate/generator_parts.h"
#include "properties/shrink/case_parts.h"
#include "reference/profiles/engine_profile.h"
#include "sim/connectors/connector_config.h"
#include "sim/engine/fault_plan.h"

namespace lockstep {
namespace {

// What Scheduler::create() takes beside a connector.
bool takes_connector(const SavedCase& saved) {
  return engine_profile(saved.engine.engine).models_connectors && !has_states(saved) &&
         !saved.engine.async_scheduling;
}

void draw_host_tier(Draw& draw, SavedCase& saved) {
  saved.connector.num_host_blocks = draw.choices.one_of<std::int64_t>(
      {saved.cache.num_blocks, draw.choices.between(1, 8), 4 * saved.cache.num_blocks});
  saved.connector.delay_steps_max = draw.choices.one_of({3, 0, 1, 8});
}

}  // namespace

void draw_connector(Draw& draw, SavedCase& saved) {
  if (!takes_connector(saved)) return;
  // A host tier finds blocks by their hashes.
  const bool is_host = draw.has(Feature::host_tier) && saved.engine.enable_prefix_caching;
  if (!is_host && !draw.has(Feature::connector_peers)) return;
  saved.connector.parts = {is_host ? ConnectorKind::host : ConnectorKind::peers};
  if (is_host) draw_host_tier(draw, saved);
  // vLLM assigns lost blocks of several groups to no request. Some loads come through: a request
  // whose every load fails would ask for ever.
  if (draw.has(Feature::failing_loads) && saved.cache.groups.size() == 1)
    saved.connector.load_failed_percent = draw.choices.one_of({20, 50, 80});
  if (draw.has(Feature::load_failure_fails))
    saved.connector.load_failure_policy = KVLoadFailurePolicy::fail;
  if (draw.has(Feature::faults) && draw.choices.chance(50))
    saved.faults.push_back(
        faults_of(FaultPlan({{.kind = FaultKind::abort_loading, .step = draw.choices.below(8)}}))
            .front());
}

void draw_further_connectors(Draw& draw, SavedCase& saved) {
  std::vector<ConnectorKind>& parts = saved.connector.parts;
  if (parts.empty() || !draw.has(Feature::several_connectors)) return;
  const bool takes_one_group = saved.cache.groups.size() == 1;
  for (std::int64_t more = draw.choices.between(1, 2); more > 0; --more) {
    const bool had_host = std::ranges::count(parts, ConnectorKind::host) > 0;
    ConnectorKind kind = ConnectorKind::peers;
    if (saved.engine.enable_prefix_caching && draw.choices.chance(60))
      kind = ConnectorKind::host;
    else if (takes_one_group && draw.choices.chance(30))
      kind = ConnectorKind::one_group_peers;
    if (kind == ConnectorKind::host && !had_host) draw_host_tier(draw, saved);
    parts.insert(parts.begin() + draw.choices.below(std::ssize(parts) + 1), kind);
  }
}

}  // namespace lockstep
