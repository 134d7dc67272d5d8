#include "sim/connectors/connector_report.h"

#include <fmt/core.h>

#include <algorithm>
#include <set>

namespace lockstep {

namespace {

Result<void> check(const KVConnectorOutput& report, const DecisionSource& decisions,
                   const KVCacheConfig& plan) {
  const std::vector<HeldRequest> held = decisions.held();
  const std::vector<SkippedRequest> skipped = decisions.skipped();
  const auto is_held = [&](RequestId id) {
    return std::ranges::find(held, id, &HeldRequest::id) != held.end();
  };
  std::set<RequestId> over;
  for (const auto* const ids : {&report.finished_recving, &report.finished_sending})
    for (const RequestId id : *ids)
      if (!over.insert(id).second) return fail("received, sent: a request that is named twice");
  for (const RequestId id : report.finished_recving) {
    const auto waits = std::ranges::find(skipped, id, &SkippedRequest::id);
    if (is_held(id) || (waits != skipped.end() && waits->is_loading)) continue;
    return fail("received: a request that waits for no load");
  }
  for (const RequestId id : report.finished_sending)
    if (!is_held(id)) return fail("sent: a request whose blocks are not held");
  if (!report.invalid_block_ids.empty() && plan.groups.size() != 1)
    return fail(
        fmt::format("invalid_blocks: expected one KV cache group, found {}; vLLM assigns "
                    "blocks of several groups to no load",
                    plan.groups.size()));
  for (const BlockId block : report.invalid_block_ids)
    if (index_of(block) < 0 || index_of(block) >= plan.num_blocks)
      return fail(fmt::format("invalid_blocks: block {} is not in the pool of {}", index_of(block),
                              plan.num_blocks));
  return {};
}

}  // namespace

Result<KVConnectorOutput> connector_report(Workload& workload, const DecisionSource& decisions,
                                           const KVCacheConfig& plan) {
  KVConnectorOutput report;
  if (workload.connector() == nullptr) return report;
  if (auto taken = workload.connector_report(report); !taken) return tl::unexpected(taken.error());
  if (report.empty()) return report;
  if (auto sound = check(report, decisions, plan); !sound)
    return fail(
        fmt::format("step {}: worker.{}", workload.records_consumed() - 1, sound.error().message));
  return report;
}

}  // namespace lockstep
