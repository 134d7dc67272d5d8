#include "properties/judge/hit_counter.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/number_text.h"
#include "reference/plan/capacity.h"

namespace lockstep {

bool HitCounter::applies(const LockstepConfig& config) {
  const std::vector<KVCacheGroupSpec>& groups = config.backend.plan.groups;
  return config.engine.enable_prefix_caching &&
         (groups.size() > 1 || config.engine.num_spec_tokens > 0 ||
          !std::ranges::all_of(
              groups, [](const KVCacheGroupSpec& group) { return grows_with_length(group.spec); }));
}

void HitCounter::open(const LockstepConfig& config, const DecisionSource& decisions) {
  const RecordingHeader header = recording_header(config.engine, config.backend.plan.groups,
                                                  config.backend.plan.num_blocks, decisions);
  if (why_not_audited(header).empty()) auditor_.emplace(header, AuditScope::hits_only);
}

void HitCounter::take(const RecordedStep& step) {
  auditor_->step(step);
  auditor_->take_findings();
}

double hit_share(const HitTotals& hits) {
  if (hits.there == 0) return 100;
  return 100.0 * static_cast<double>(hits.hit) / static_cast<double>(hits.there);
}

std::string losses_text(const HitTotals& hits) {
  std::string losses;
  for (std::size_t i = 0; i < kHitLosses; ++i)
    if (hits.lost[i] > 0)
      losses += fmt::format("{}{} {}", losses.empty() ? "" : ", ", with_commas(hits.lost[i]),
                            name_of(static_cast<HitLoss>(i)));
  return losses;
}

nlohmann::ordered_json json_of(const HitTotals& hits) {
  nlohmann::ordered_json json = {{"lookups", hits.lookups},
                                 {"tokens", hits.tokens},
                                 {"in_pool", hits.there},
                                 {"hit", hits.hit},
                                 {"share_percent", hit_share(hits)}};
  for (std::size_t i = 0; i < kHitLosses; ++i)
    json["not_hit"][name_of(static_cast<HitLoss>(i))] = hits.lost[i];
  return json;
}

}  // namespace lockstep
