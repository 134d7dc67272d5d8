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

struct WaitingRequest {
  std::string name;
  std::int64_t blocks_held = 0;
  std::int64_t blocks_missing = 0;  // blocks it still needs to continue
  std::int64_t held_since = -1;     // step; -1: holds none
  bool is_loading = false;
};

// A moment at which no request runs, as to one pool.
struct Standstill {
  std::vector<WaitingRequest> queue;  // in the order in which the scheduler looks at them
  std::int64_t blocks_held_by_finished = 0;
  std::int64_t free_blocks = 0;
  std::int64_t total_blocks = 0;  // without the null block
  std::string_view place{};       // of the pool, in words: " on the host"; empty: the device
};

struct WaitCycle {
  std::vector<std::string> requests;  // in queue order
  bool head_holds_blocks = false;     // the first of them has loaded a part, and needs more
  std::string text;                   // which of them waits for which, in one or more lines
};

// The cycle of the request at the front of the queue. Absent: all waiting may end by itself, or can
// never end because a request is larger than the pool.
std::optional<WaitCycle> find_wait_cycle(const Standstill& standstill);

// Blocks that a waiting request still needs: for all its tokens if the engine reserves them at
// once, otherwise for its next chunk.
std::int64_t num_blocks_missing(const EngineConfig& engine,
                                std::span<const KVCacheGroupSpec> groups, std::int64_t num_tokens,
                                std::int64_t num_computed_tokens, std::int64_t blocks_held);

// Since when waiting requests hold blocks; without a KV connector, none do.
class HoldingWatch {
 public:
  // Once a step, after its output was processed.
  void step(const Scheduler& scheduler, std::int64_t step);
  std::int64_t since(RequestId request) const;  // -1: holds none

 private:
  std::map<RequestId, std::int64_t> since_;
};

// For each pool one: the host, where there is one, and the device.
// REQUIRES: no request runs.
std::vector<Standstill> standstills_of(const Scheduler& scheduler, const EngineConfig& engine,
                                       const KVCacheConfig& plan, const HoldingWatch& watch);

// Detects livelock: requests that preempt each other forever run, but sample nothing and never
// finish. Every step schedules at least one token, so scheduling all of them several times over
// without a sample is no progress. Steps blocked by a fault do not count, nor do steps before a
// report of a KV connector. Reports without a sample are limited, too: loading and freeing in turns
// is no progress.
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
  // Once a step.
  bool is_stuck(const DecisionSource& decisions);

 private:
  static constexpr std::int64_t kReportsMax = 256;
  void got_further() { steps_ = reports_ = 0; }

  const RunConfig& config_;
  std::int64_t steps_ = 0;
  std::int64_t reports_ = 0;  // of a connector since there was progress
};

// Whether nothing runs, and a request that holds blocks waits for one behind it. Only the model's
// scheduler can tell.
bool has_wait_cycle(const RunConfig& config, const DecisionSource& decisions,
                    const HoldingWatch& holding);
// Sets the verdict: which request is stuck, and why: "needs about 12 blocks for its 190 tokens; 3
// of 40 are free, and no running request will free any".
void set_liveness_verdict(const RunConfig& config, const DecisionSource& decisions,
                          const std::function<std::string_view(RequestId)>& name,
                          const HoldingWatch& holding, RunSummary& summary);

}  // namespace lockstep
