// Progress of a run, and which request waits for which when nothing runs: requests that wait for
// blocks, requests queued after others, and the cycle that none of them can leave.
//
// Invariants: a request waits for
// (1) the requests before it in the queue that do not fit: the scheduler stops at the first of
//     them;
// (2) every request that holds blocks, if it does not fit, and would not fit even after the
//     transfers that end by themselves (those of finished requests, and of requests ahead of all
//     that do not fit) have freed their blocks.
// A loading request also waits for its transfer, which is not an edge of the graph: once the
// transfer has completed, (1) still holds.
//
// Example, pool of 10 blocks: A holds 4 and needs 4 more, B holds 6 and needs 2 more. A waits for
// B's blocks by (2), B for A by (1): a cycle.
//
// find_wait_cycle() does not decide how many blocks a request needs: its caller counts them.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "reference/schedule/decision_source.h"
#include "reference/schedule/scheduler.h"
#include "reference/types/engine_config.h"
#include "reference/types/kv_cache_spec.h"
#include "sim/engine/step_observer.h"
#include "sim/verdict/run_summary.h"

namespace lockstep {

// A request that does not run, and its blocks in one pool.
struct WaitingRequest {
  std::string name;
  std::int64_t blocks_held = 0;
  std::int64_t blocks_missing = 0;  // blocks it still needs to continue
  std::int64_t held_since = -1;     // step; -1: holds none
  bool is_loading = false;
};

// One pool at a moment at which no request runs.
struct Standstill {
  std::vector<WaitingRequest> queue;         // in the order in which the scheduler tries them
  std::int64_t blocks_held_by_finished = 0;  // of finished requests whose transfers are in flight
  std::int64_t free_blocks = 0;
  std::int64_t total_blocks = 0;  // without the null block
  std::string_view place{};       // of the pool, for messages: " on the host"; empty: the device
};

// A set of requests none of which can continue before another of them does.
struct WaitCycle {
  std::vector<std::string> requests;  // in queue order
  bool head_holds_blocks = false;     // true if the first one has loaded a part and needs more
  std::string text;                   // the requests and what each waits for, in one or more lines
};

// Returns the first cycle in queue order. Absent: all waiting may end by itself, or can never end
// because a request is larger than the pool (which why_stuck() reports). Linear in the edges: at
// most the square of the queue's length.
std::optional<WaitCycle> find_wait_cycle(const Standstill& standstill);

// Returns the blocks that a waiting request still needs: for all its tokens if the engine reserves
// them at once (scheduler_reserve_full_isl), otherwise for its next chunk. 0: it fits into the
// blocks it holds. An estimate: prefix hits are not considered.
std::int64_t num_blocks_missing(const EngineConfig& engine,
                                std::span<const KVCacheGroupSpec> groups, std::int64_t num_tokens,
                                std::int64_t num_computed_tokens, std::int64_t blocks_held);

// Records since which step each waiting request has held blocks. Without a KV connector, none does.
class HoldingWatch {
 public:
  // Updates the record. Called once per step, after its output is processed.
  void step(const Scheduler& scheduler, std::int64_t step);
  std::int64_t since(RequestId request) const;  // step; -1: holds none

 private:
  std::map<RequestId, std::int64_t> since_;
};

// Returns the state of each pool: the host, if the engine has one, then the device. REQUIRES: no
// request runs.
std::vector<Standstill> standstills_of(const Scheduler& scheduler, const EngineConfig& engine,
                                       const KVCacheConfig& plan, const HoldingWatch& watch);

// Detects livelock: requests that preempt each other forever run, but sample nothing and never
// finish. Every step schedules at least one token, so a number of steps several times the tokens of
// all requests, without a sample, is not progress. Steps blocked by a fault do not count, nor do
// steps before a report of a KV connector. Reports without a sample are limited to kReportsMax: a
// connector that loads and frees in turns makes no progress either.
class ProgressGuard {
 public:
  explicit ProgressGuard(const RunConfig& config) : config_(config) {}
  void arrived() { got_further(); }
  void sampled() { got_further(); }
  void left() { got_further(); }
  void hindered() { got_further(); }
  void reported() {
    if (++reports_ <= kReportsMax) steps_ = 0;
  }
  // Counts a step. True if too many steps have passed without progress; checked every 1,024 steps.
  bool is_stuck(const DecisionSource& decisions);

 private:
  static constexpr std::int64_t kReportsMax = 256;
  void got_further() { steps_ = reports_ = 0; }

  const RunConfig& config_;
  std::int64_t steps_ = 0;
  std::int64_t reports_ = 0;  // reports of a connector since the last progress
};

// True if no request runs and the queue has a cycle. False if another engine decides: only the
// model's scheduler has block tables.
bool has_wait_cycle(const RunConfig& config, const DecisionSource& decisions,
                    const HoldingWatch& holding);
// Sets the verdict: the cycle if there is one, and for up to 20 requests why each is stuck: "needs
// about 12 blocks for its 190 tokens; 3 of 40 are free, and no running request will free any".
// `preempts`: the running requests preempt each other.
void set_liveness_verdict(const RunConfig& config, const DecisionSource& decisions,
                          const std::function<std::string_view(RequestId)>& name,
                          const HoldingWatch& holding, bool preempts, RunSummary& summary);

}  // namespace lockstep
