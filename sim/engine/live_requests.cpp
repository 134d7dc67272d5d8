#include "sim/engine/live_requests.h"

#include <set>

#include "reference/plan/rank_plan.h"

namespace lockstep {

// Checks that the scheduler can follow a report. failed_recving is not checked: vLLM 0.33.0 ignores
// requests in it that wait for no load (v1/core/sched/scheduler.py, _handle_failed_recving()).
static Result<void> check(const KVConnectorOutput& report, const DecisionSource& decisions,
                          const KVCacheConfig& plan) {
  const std::vector<HeldRequest> held = decisions.held();
  const std::vector<SkippedRequest> skipped = decisions.skipped();
  const auto is_held = [&](RequestId id) {
    return std::ranges::find(held, id, &HeldRequest::id) != held.end();
  };
  // Finished transfers free blocks, so a second report of one request would free them twice.
  std::set<RequestId> over;
  for (const auto* const ids : {&report.finished_recving, &report.finished_sending})
    for (const RequestId id : *ids)
      if (!over.insert(id).second) return fail("received, sent: a request that is named twice");
  for (const RequestId id : report.finished_recving) {
    // A load ends for a request that waits for it, or for a finished one that still holds the
    // blocks.
    const auto waits = std::ranges::find(skipped, id, &SkippedRequest::id);
    if (is_held(id) || (waits != skipped.end() && waits->is_loading)) continue;
    return fail("received: a request that waits for no load");
  }
  for (const RequestId id : report.finished_sending)
    if (!is_held(id)) return fail("sent: a request whose blocks are not held");
  // vLLM 0.33.0 raises here (v1/core/sched/scheduler.py, _handle_invalid_blocks()): a block id does
  // not identify a group.
  if (!report.invalid_block_ids.empty() && plan.groups.size() != 1)
    return fail(
        "invalid_blocks: expected one KV cache group, found {}; vLLM assigns blocks of several "
        "groups to no load",
        plan.groups.size());
  for (const BlockId block : report.invalid_block_ids)
    if (index_of(block) < 0 || index_of(block) >= plan.num_blocks)
      return fail("invalid_blocks: block {} is not in the pool of {}", index_of(block),
                  plan.num_blocks);
  return {};
}

static Result<KVConnectorOutput> report_of(Workload& workload, const DecisionSource& decisions,
                                           const KVCacheConfig& plan) {
  KVConnectorOutput report;
  LS_RETURN_IF_ERROR(workload.connector_report(report));
  if (report.empty()) return report;
  // Recordings have this report under the key "worker".
  if (auto sound = check(report, decisions, plan); !sound)
    return fail("step {}: worker.{}", workload.records_consumed() - 1, sound.error().message);
  return report;
}

ConnectorStep::ConnectorStep(const RunConfig& config, const DecisionSource& decisions,
                             Workload& workload)
    : config_(config), decisions_(decisions), workload_(workload) {
  // Under context parallelism an entry covers block_size tokens on each rank that shards the group.
  for (const KVCacheGroupSpec& group : config.backend.plan.groups)
    block_tokens_.push_back(group.spec.block_size *
                            rank_in(config.backend.context, group.spec).num_ranks);
}

Result<void> ConnectorStep::take_report(const SchedulerOutput& decision,
                                        const OutputsInFlight& outputs) {
  if (!is_there()) return {};
  LS_ASSIGN_OR_RETURN(report_, report_of(workload_, decisions_, config_.backend.plan));
  for (const auto transfers :
       {&KVConnectorOutput::finished_recving, &KVConnectorOutput::finished_sending})
    for (const RequestId id : report_.*transfers)
      if (const auto step = outputs.step_that_ends(transfers, id))
        return fail(
            "step {}: worker: a transfer of request {} completes, but already completed in step {}",
            decision.step, decisions_.name(id), *step);
  return {};
}

Result<void> ConnectorStep::plan(const SchedulerOutput& decision, bool has_memory,
                                 RunSummary& summary) {
  if (workload_.transfers() == nullptr) return {};
  // A followed recording has the reports of its transfers. Without memory, nothing needs a plan.
  if (decisions_.model() == nullptr && !has_memory && workload_.is_scripted()) return {};
  transfers_.clear();
  for (const HeldRequest& held : decisions_.held()) transfers_.held.push_back(held.id);
  transfers_.lost = report_.invalid_block_ids;
  workload_.transfers()->plan({.decision = decision,
                               .decisions = decisions_,
                               .report = report_,
                               .block_tokens = block_tokens_},
                              transfers_);
  // The engine continues past a lost block before it is notified of the loss (docs/findings.md,
  // 15): what its worker then reads belongs to no request.
  if (has_memory && config_.engine.async_scheduling && !transfers_.lost.empty())
    return fail(
        "step {}: blocks that a load did not fill, with asynchronous scheduling: on a backend this "
        "is not modelled; run only the decisions (--backend none), without such loads "
        "(--load-failures 0), or a trace with --no-async-scheduling",
        decision.step);
  summary.blocks_loaded += std::ssize(transfers_.loads);
  summary.blocks_stored += std::ssize(transfers_.stores);
  summary.blocks_lost += std::ssize(transfers_.lost);
  summary.host_evictions = transfers_.num_evicted;
  summary.frees_delayed = transfers_.num_frees_delayed;
  return {};
}

}  // namespace lockstep
