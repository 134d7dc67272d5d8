#include "sim/engine/wait_graph.h"

#include <fmt/core.h>
#include <fmt/format.h>
#include <boost/graph/adjacency_list.hpp>
#include <boost/graph/strong_components.hpp>

#include <algorithm>
#include <set>
#include <utility>

#include "base/check.h"
#include "reference/plan/page_size.h"
#include "reference/plan/rank_plan.h"

namespace lockstep {
namespace {

using Graph = boost::adjacency_list<boost::vecS, boost::vecS, boost::directedS>;

// Builds the graph of the header's invariants: an edge from i to j means that i waits for j.
Graph wait_graph(const Standstill& standstill) {
  const std::vector<WaitingRequest>& queue = standstill.queue;
  Graph graph(queue.size());
  std::vector<std::size_t> holders;
  // Blocks that are free, or become free without any request that waits here.
  std::int64_t released = standstill.free_blocks + standstill.blocks_held_by_finished;
  for (std::size_t i = 0; i < queue.size(); ++i)
    if (queue[i].blocks_held > 0) holders.push_back(i);
  std::optional<std::size_t> obstacle;  // the last request so far that does not fit
  for (std::size_t i = 0; i < queue.size(); ++i) {
    const WaitingRequest& request = queue[i];
    // One edge to the last request that does not fit suffices: it waits for the previous one.
    if (obstacle) boost::add_edge(i, *obstacle, graph);
    if (request.is_loading) {
      // A load ahead of all obstacles completes; its request is then scheduled, finishes and frees
      // its blocks. After an obstacle it also completes, but its request is never scheduled.
      if (!obstacle) released += request.blocks_held;
      continue;
    }
    if (request.blocks_missing <= released) continue;
    obstacle = i;
    // A request that is larger than the pool waits for no other: that is another finding.
    if (request.blocks_held + request.blocks_missing > standstill.total_blocks) continue;
    for (const std::size_t holder : holders)
      if (holder != i) boost::add_edge(i, holder, graph);
  }
  return graph;
}

std::string blocks_text(std::int64_t count) {
  return fmt::format("{} block{}", count, count == 1 ? "" : "s");
}

std::string holding_text(const WaitingRequest& request) {
  return fmt::format("{}, held since step {}", blocks_text(request.blocks_held),
                     request.held_since);
}

// Describes a cycle: the first request needs blocks, and the others hold them after it in the
// queue. The first of a component always does not fit, since only such requests wait for later
// ones.
std::string cycle_text(const Standstill& standstill, const std::vector<WaitingRequest>& cycle) {
  const WaitingRequest& first = cycle.front();
  std::vector<std::string> holders;
  for (std::size_t i = 1; i < cycle.size(); ++i)
    if (cycle[i].blocks_held > 0)
      holders.push_back(fmt::format("{} ({})", cycle[i].name, holding_text(cycle[i])));
  return fmt::format(
      "{}{} waits for {} more{}, and {} of {} are free; {} {} after it in the queue: none of them "
      "can continue",
      first.name, first.blocks_held > 0 ? fmt::format(" ({})", holding_text(first)) : std::string(),
      blocks_text(first.blocks_missing), standstill.place, standstill.free_blocks,
      standstill.total_blocks, fmt::join(holders, ", "), holders.size() == 1 ? "waits" : "wait");
}

// Steps between two looks at all requests, which cost time linear in their number.
constexpr std::int64_t kCheckEvery = 1024;
// Times that every token may be scheduled without a sample. Preemption may repeat a whole prefill,
// so 1 would be too strict.
constexpr std::int64_t kRoundsOfPreemption = 4;
// Requests named in a verdict; all of them are counted.
constexpr std::int64_t kStuckNamed = 20;

// A pool, and the groups [begin, end) of the plan that allocate from it.
struct PoolOfGroups {
  std::size_t begin = 0, end = 0;
  std::int64_t free_blocks = 0;
  std::int64_t total_blocks = 0;  // without the null block
  std::string_view place{};       // as in Standstill
};

// Returns the pools of the plan. The host's group is the first one, if the engine has a host pool;
// both pools have a null block.
std::vector<PoolOfGroups> pools_of(const DecisionSource& decisions, const EngineConfig& engine,
                                   const KVCacheConfig& plan) {
  std::vector<PoolOfGroups> pools;
  const bool has_host = !plan.groups.empty() && decisions.model() != nullptr &&
                        plan.groups.front().role == kPageSourceRole;
  if (has_host)
    pools.push_back({0, 1, decisions.model()->num_free_host_blocks(),
                     engine.host_pool_num_blocks - 1, " on the host"});
  pools.push_back(
      {has_host ? 1u : 0u, plan.groups.size(), decisions.num_free_blocks(), plan.num_blocks - 1});
  return pools;
}

std::span<const KVCacheGroupSpec> groups_in(const KVCacheConfig& plan, const PoolOfGroups& pool) {
  return std::span(plan.groups).subspan(pool.begin, pool.end - pool.begin);
}

// Explains why a request does not run: it can never fit, no request will free blocks for it, or it
// would fit and the queue stops before it. The pools are checked in order; the last one without a
// problem gives the numbers. `is_blocked`: an earlier request does not fit. Set if this one does
// not.
std::string why_stuck(const DecisionSource& decisions, const RunConfig& config, RequestId id,
                      bool& is_blocked) {
  const KVCacheConfig& plan = config.backend.plan;
  const std::int64_t tokens = decisions.num_tokens(id);
  std::string why;
  for (const PoolOfGroups& pool : pools_of(decisions, config.engine, plan)) {
    const std::int64_t needed =
        num_blocks_missing(config.engine, groups_in(plan, pool), tokens, tokens, 0);
    why = fmt::format("needs about {} blocks{} for its {} tokens; {} of {} are free", needed,
                      pool.place, tokens, pool.free_blocks, pool.total_blocks);
    if (pool.free_blocks >= needed) continue;
    is_blocked = true;
    return why + (needed > pool.total_blocks ? ": it can never fit"
                                             : ", and no running request will free any");
  }
  if (is_blocked) return why + ": enough, but earlier requests in the queue do not fit";
  const auto num_running = std::ssize(decisions.running());
  return why + (num_running < config.engine.max_num_seqs
                    ? ": enough, but the engine does not schedule it"
                    : fmt::format(": enough, but {} requests run, and no more may (max_num_seqs)",
                                  num_running));
}

std::optional<WaitCycle> first_cycle(const std::vector<Standstill>& standstills) {
  for (const Standstill& standstill : standstills)
    if (auto cycle = find_wait_cycle(standstill)) return cycle;
  return std::nullopt;
}

// Returns the cycle of the run's current state, host first.
std::optional<WaitCycle> wait_cycle(const RunConfig& config, const DecisionSource& decisions,
                                    const HoldingWatch& holding) {
  if (decisions.model() == nullptr || !decisions.running().empty()) return std::nullopt;
  std::vector<Standstill> standstills =
      standstills_of(*decisions.model(), config.engine, config.backend.plan, holding);
  auto cycle = first_cycle(standstills);
  const bool holders_first = decisions.deferred().has_value();
  if (cycle || holders_first || config.engine.policy == SchedulingPolicy::fcfs) return cycle;
  // With priority scheduling, the better head of the two queues is tried first, so a waiting
  // request may precede the skipped ones. The second order has them last: if one of the passed-over
  // requests could continue, the others wait for it.
  for (Standstill& standstill : standstills)
    std::ranges::rotate(standstill.queue,
                        standstill.queue.begin() + std::ssize(decisions.skipped()));
  return first_cycle(standstills);
}

}  // namespace

std::optional<WaitCycle> find_wait_cycle(const Standstill& standstill) {
  const Graph graph = wait_graph(standstill);
  std::vector<int> component(boost::num_vertices(graph));
  boost::strong_components(graph, boost::make_iterator_property_map(
                                      component.begin(), boost::get(boost::vertex_index, graph)));
  for (std::size_t i = 0; i < component.size(); ++i) {
    // A component of one request is not a cycle; the graph has no edge from a request to itself.
    if (std::ranges::count(component, component[i]) < 2) continue;
    WaitCycle cycle;
    std::vector<WaitingRequest> members;
    for (std::size_t j = i; j < component.size(); ++j) {
      if (component[j] != component[i]) continue;
      members.push_back(standstill.queue[j]);
      cycle.requests.push_back(standstill.queue[j].name);
    }
    cycle.head_holds_blocks = members.front().blocks_held > 0;
    cycle.text = cycle_text(standstill, members);
    return cycle;
  }
  return std::nullopt;
}

// Returns the blocks that a request's first allocation takes in a group for its tokens. A recurrent
// state takes one block plus one per draft token, whatever the length. A window or chunk keeps at
// most its own length and one partial block.
static std::int64_t num_blocks_for(const KVCacheSpec& spec, std::int64_t tokens) {
  if (is_state_kind(spec.kind) && spec.mamba_cache_mode != MambaCacheMode::all)
    return 1 + spec.num_speculative_blocks;
  if (is_hot_pages(spec.kind)) return spec.blocks_per_request;
  std::int64_t kept = tokens;
  if (is_sliding_window(spec.kind)) kept = std::min(tokens, spec.sliding_window + spec.block_size);
  if (is_chunked(spec.kind)) kept = std::min(tokens, spec.attention_chunk_size + spec.block_size);
  return cdiv(kept, spec.block_size);
}

std::int64_t num_blocks_missing(const EngineConfig& engine,
                                std::span<const KVCacheGroupSpec> groups, std::int64_t num_tokens,
                                std::int64_t num_computed_tokens, std::int64_t blocks_held) {
  std::int64_t tokens = num_tokens;
  // Draft tokens need slots once the request decodes.
  if (num_computed_tokens > 0)
    tokens = std::min<std::int64_t>(tokens + num_lookahead_tokens(engine), engine.max_model_len);
  // A step computes at most the token budget; the request continues with the blocks of that chunk.
  if (!engine.scheduler_reserve_full_isl)
    tokens = std::min(tokens, num_computed_tokens + engine.max_num_batched_tokens);
  std::int64_t count = 0;
  for (const KVCacheGroupSpec& group : groups)
    count += num_blocks_for(group.spec, cdiv(tokens, num_context_ranks(engine, group.spec)));
  return std::max<std::int64_t>(count - blocks_held, 0);
}

// Counts the request's entries in the pool's groups, without null blocks. Shared blocks count once
// per request.
static std::int64_t num_blocks_held(const Scheduler& scheduler, RequestId request,
                                    const PoolOfGroups& pool) {
  std::int64_t count = 0;
  for (std::size_t g = pool.begin; g < pool.end; ++g)
    count += std::ranges::count_if(scheduler.block_table(request, static_cast<std::int32_t>(g)),
                                   [](BlockId block) { return block != kNullBlock; });
  return count;
}

// Counts pages that only the host has; they need no block on the device until they are read.
static std::int64_t num_pages_elsewhere(const Scheduler& scheduler, RequestId request,
                                        const KVCacheConfig& plan, const PoolOfGroups& pool) {
  std::int64_t count = 0;
  for (std::size_t g = pool.begin; g < pool.end; ++g)
    if (is_resident_pages(plan.groups[g].spec.kind))
      count += std::ranges::count(scheduler.block_table(request, static_cast<std::int32_t>(g)),
                                  kNullBlock);
  return count;
}

void HoldingWatch::step(const Scheduler& scheduler, std::int64_t step) {
  // Rebuilt in each step, so a request that has lost its blocks is forgotten.
  std::map<RequestId, std::int64_t> now;
  for (const SkippedRequest& request : scheduler.skipped()) {
    if (scheduler.block_table(request.id, 0).empty()) continue;
    const auto before = since_.find(request.id);
    now.insert({request.id, before == since_.end() ? step : before->second});
  }
  since_ = std::move(now);
}

std::int64_t HoldingWatch::since(RequestId request) const {
  const auto found = since_.find(request);
  return found == since_.end() ? -1 : found->second;
}

std::vector<Standstill> standstills_of(const Scheduler& scheduler, const EngineConfig& engine,
                                       const KVCacheConfig& plan, const HoldingWatch& watch) {
  LS_CHECK(scheduler.running().empty(), "{} requests run", scheduler.running().size());
  std::vector<Standstill> standstills;
  for (const PoolOfGroups& pool : pools_of(scheduler, engine, plan)) {
    Standstill& standstill = standstills.emplace_back();
    standstill.free_blocks = pool.free_blocks;
    standstill.total_blocks = pool.total_blocks;
    standstill.place = pool.place;
    const auto add = [&](RequestId id, bool is_loading) {
      const std::int64_t held = num_blocks_held(scheduler, id, pool);
      const std::int64_t elsewhere = num_pages_elsewhere(scheduler, id, plan, pool);
      standstill.queue.push_back({.name = std::string(scheduler.name(id)),
                                  .blocks_held = held,
                                  .blocks_missing = num_blocks_missing(
                                      engine, groups_in(plan, pool), scheduler.num_tokens(id),
                                      scheduler.num_computed_tokens(id), held + elsewhere),
                                  .held_since = watch.since(id),
                                  .is_loading = is_loading});
    };
    for (const SkippedRequest& request : scheduler.skipped()) add(request.id, request.is_loading);
    for (const RequestId id : scheduler.waiting()) add(id, false);
    for (const HeldRequest& request : scheduler.held())
      standstill.blocks_held_by_finished += num_blocks_held(scheduler, request.id, pool);
  }
  return standstills;
}

bool ProgressGuard::is_stuck(const DecisionSource& decisions) {
  // Short runs never reach a check: their steps are few enough to end by themselves.
  if (++steps_ % kCheckEvery != 0) return false;
  std::int64_t tokens = 0;
  for (const RequestId id : decisions.running()) tokens += decisions.num_tokens(id);
  for (const RequestId id : decisions.waiting()) tokens += decisions.num_tokens(id);
  for (const SkippedRequest& request : decisions.skipped())
    tokens += decisions.num_tokens(request.id);
  // With asynchronous scheduling every other step may be empty while an output is awaited.
  const std::int64_t per_step = config_.engine.async_scheduling ? 2 : 1;
  return steps_ > kRoundsOfPreemption * per_step * tokens;
}

bool has_wait_cycle(const RunConfig& config, const DecisionSource& decisions,
                    const HoldingWatch& holding) {
  return wait_cycle(config, decisions, holding).has_value();
}

void set_liveness_verdict(const RunConfig& config, const DecisionSource& decisions,
                          const std::function<std::string_view(RequestId)>& name,
                          const HoldingWatch& holding, bool preempts, RunSummary& summary) {
  summary.verdict = Verdict::liveness;
  if (auto cycle = wait_cycle(config, decisions, holding)) {
    summary.cycle_head_holds_blocks = cycle->head_holds_blocks;
    summary.wait_cycle = std::move(cycle->text);
  }
  bool is_blocked = false;
  const auto waits = [&](RequestId id) {
    if (++summary.stuck_total > kStuckNamed) return;
    summary.stuck.push_back(
        {.name = std::string(name(id)), .why = why_stuck(decisions, config, id, is_blocked)});
  };
  std::set<RequestId> skipped;
  for (const SkippedRequest& request : decisions.skipped())
    if (skipped.insert(request.id).second) waits(request.id);
  // Another engine's queue includes those that it skipped.
  for (const RequestId id : decisions.waiting())
    if (!skipped.contains(id)) waits(id);
  for (const RequestId id : decisions.running()) {
    if (++summary.stuck_total > kStuckNamed) continue;
    summary.stuck.push_back(
        {.name = std::string(name(id)),
         .why = preempts ? "runs, but is preempted before it makes progress"
                         : fmt::format("runs with {} tokens, but the engine does not schedule it; "
                                       "{} of {} blocks are free",
                                       decisions.num_tokens(id), decisions.num_free_blocks(),
                                       config.backend.plan.num_blocks - 1)});
  }
}

}  // namespace lockstep
