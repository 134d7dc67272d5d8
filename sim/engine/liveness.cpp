#include "sim/engine/liveness.h"

#include <fmt/core.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "sim/engine/wait_graph.h"

namespace lockstep {
namespace {

constexpr std::int64_t kCheckEvery = 1024;
constexpr std::int64_t kRoundsOfPreemption = 4;
constexpr std::int64_t kStuckNamed = 20;

std::string why_stuck(const DecisionSource& decisions, const RunConfig& config, RequestId id) {
  const KVCacheConfig& plan = config.device.plan;
  const std::int64_t tokens = decisions.num_tokens(id);
  const std::int64_t needed = num_blocks_missing(config.engine, plan.groups, tokens, tokens, 0);
  const std::int64_t total = plan.num_blocks - 1;  // without the null block
  const std::int64_t free = decisions.num_free_blocks();
  std::string why = fmt::format("needs about {} blocks for its {} tokens; {} of {} are free",
                                needed, tokens, free, total);
  if (needed > total) return why + ": it can never fit";
  if (free < needed) return why + ", and nobody runs who would free any";
  return why + ": they would do, yet those before it in the queue do not fit";
}

std::optional<WaitCycle> wait_cycle(const RunConfig& config, const DecisionSource& decisions,
                                    const HoldingWatch& holding) {
  if (decisions.model() == nullptr || !decisions.running().empty()) return std::nullopt;
  Standstill standstill =
      standstill_of(*decisions.model(), config.engine, config.device.plan, holding);
  auto cycle = find_wait_cycle(standstill);
  if (cycle || config.engine.policy == SchedulingPolicy::fcfs) return cycle;
  // By priority the better head of the two queues comes first. Somebody of those that were passed
  // over could go on, and has not: the others stand before it.
  std::ranges::rotate(standstill.queue, standstill.queue.begin() + std::ssize(decisions.skipped()));
  return find_wait_cycle(standstill);
}

}  // namespace

bool ProgressGuard::is_stuck(const DecisionSource& decisions) {
  if (++steps_ % kCheckEvery != 0) return false;
  std::int64_t tokens = 0;
  for (const RequestId id : decisions.running()) tokens += decisions.num_tokens(id);
  for (const RequestId id : decisions.waiting()) tokens += decisions.num_tokens(id);
  for (const SkippedRequest& request : decisions.skipped())
    tokens += decisions.num_tokens(request.id);
  const std::int64_t per_step = config_.engine.async_scheduling ? 2 : 1;
  return steps_ > kRoundsOfPreemption * per_step * tokens;
}

bool has_wait_cycle(const RunConfig& config, const DecisionSource& decisions,
                    const HoldingWatch& holding) {
  return wait_cycle(config, decisions, holding).has_value();
}

void set_liveness_verdict(const RunConfig& config, const DecisionSource& decisions,
                          const std::function<std::string_view(RequestId)>& name,
                          const HoldingWatch& holding, RunSummary& summary) {
  summary.verdict = Verdict::liveness;
  if (auto cycle = wait_cycle(config, decisions, holding)) {
    summary.cycle_head_holds_blocks = cycle->head_holds_blocks;
    summary.wait_cycle = std::move(cycle->text);
  }
  const auto waits = [&](RequestId id) {
    if (++summary.stuck_total > kStuckNamed) return;
    summary.stuck.push_back(
        {.name = std::string(name(id)), .why = why_stuck(decisions, config, id)});
  };
  for (const SkippedRequest& request : decisions.skipped()) waits(request.id);
  for (const RequestId id : decisions.waiting()) waits(id);
  for (const RequestId id : decisions.running()) {
    if (++summary.stuck_total > kStuckNamed) continue;
    summary.stuck.push_back({.name = std::string(name(id)),
                             .why = "it runs, but is preempted before it gets anywhere"});
  }
}

}  // namespace lockstep
