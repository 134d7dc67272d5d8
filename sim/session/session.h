// A run, assembled from its description: arrivals, connectors, faults, decision source, backends
// and observers. One engine, or one per data parallel rank.
//
// From the clients to the loop, each reads the previous one:
//   clients -> (share of a data parallel rank) -> connectors -> faults -> Onlooker -> the loop
//
// Invariants
// (1) A session owns everything it runs; its description may be destroyed once it is open.
// (2) Same description, same run.
// (3) Opening returns the errors of faults, scheduler and backends, in this order, engine by
//     engine; run() and start() return those of the loop.
// REQUIRES: check_setup() has passed.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "reference/defects/scheduler_defect.h"
#include "reference/profiles/compatibility.h"
#include "sim/connectors/connect.h"
#include "sim/engine/faults.h"
#include "sim/engine/lockstep.h"
#include "sim/engine/step_observer.h"
#include "sim/engine/workload.h"
#include "sim/hidden_states/hidden_states.h"
#include "sim/protocol/backend.h"
#include "sim/ranks/data_parallel.h"
#include "sim/ranks/rank_union.h"
#include "sim/report/timeline.h"
#include "sim/step/backend_config.h"
#include "traces/formats/saved_case.h"

namespace lockstep {

// The configuration of a run: its engines' loops, their extensions, and planted defects.
struct LockstepConfig : RunConfig {
  SchedulerDefect scheduler_defect = SchedulerDefect::none;
  ConnectorConfig connector;          // for a workload that brings none
  DataParallelOptions data_parallel;  // several engines
  HiddenStateDefect hidden_state_defect = HiddenStateDefect::none;
  bool draw = false;  // collect a timeline
};

// What the configuration says, without a connector of its workload.
RunFacts facts_of(const LockstepConfig& config);
// Refused: what the table of compatibility.h refuses of the configuration with `more`, numbers of
// engines and ranks, and layouts that the plan cannot take.
Result<void> check_setup(const LockstepConfig& config, RunTraits more = {});

// Errors: a plan, a configuration or a mutant that it does not take.
using BackendFactory = std::function<Result<std::unique_ptr<Backend>>(const BackendConfig& config)>;

// Stands between an engine and its workload, or looks on. It outlives the session; may be null.
struct Onlooker {
  Workload* workload = nullptr;      // the engine asks it, and not the workload that it was shown
  KVConnector* connector = nullptr;  // the scheduler asks it, and not that of the workload
  StepObserver* observer = nullptr;
};
// `workload`: of the engine, as far as it is put together; null where the clients are.
using Attach = std::function<Onlooker(std::int32_t dp_rank, Workload* workload)>;

struct SessionParts {
  // All that arrives, without connectors of the configuration. Null: `attach` brings the workload.
  std::unique_ptr<Workload> clients;
  std::uint64_t connector_seed = 0;
  std::vector<Fault> faults;        // every engine meets all of them
  std::vector<BlockId> free_order;  // Scheduler::order_free_blocks; empty: the engine's own
  // Absent: the model's scheduler. Faults and an order of free blocks are refused with it.
  DecisionsFactory decisions;
  // Called for each rank of each engine. Absent, or null from it: decisions only.
  BackendFactory backend;
  std::vector<Backend*> borrowed;  // in place of `backend`: of one engine, they outlive the session
  Attach attach;
};

struct SessionEngine {
  std::unique_ptr<Workload> owned;         // what arrives, with its connectors and faults
  Workload* workload = nullptr;            // what the loop asks
  DealtWorkload* dealt = nullptr;          // of several engines
  const FaultyWorkload* faulty = nullptr;  // null: there are no faults
  std::unique_ptr<DecisionSource> decisions;
  std::vector<std::unique_ptr<Backend>> backends;
  std::vector<Backend*> ranks;  // those, or the borrowed ones
  ObserverList observers;
  std::unique_ptr<HiddenStateCheck> hidden_states;
  std::unique_ptr<RankUnion> together;
  std::vector<MemoryCheck*> checks;          // those
  std::unique_ptr<TimelineRecorder> drawer;  // null: LockstepConfig::draw does not ask for it
};

// A backend for each rank of memory, in order. None where the factory gives null.
Result<std::vector<std::unique_ptr<Backend>>> open_backends(const BackendConfig& config,
                                                            const BackendFactory& factory);

class Session {
 public:
  static Result<std::unique_ptr<Session>> open(const LockstepConfig& config, SessionParts parts);

  // Before the run. `observer` outlives the session.
  void observe(std::int32_t dp_rank, StepObserver& observer);
  // Before the run. `check` outlives the session; it sees each step after the comparison.
  void check(std::int32_t dp_rank, MemoryCheck& check);
  // Before the run: receives the hidden states of requests that have ended, compared.
  void give_hidden_states(const HiddenStateCheck::Sink& sink);
  // The run, to its end. Once.
  Result<RunReport> run();
  // ... or step by step, by the caller. REQUIRES: one engine.
  Result<std::unique_ptr<LockstepRun>> start();
  // After the run, of an engine. REQUIRES: LockstepConfig::draw.
  Timeline take_timeline(std::int32_t dp_rank);

  const LockstepConfig& config() const { return config_; }
  std::span<const SessionEngine> engines() const { return engines_; }
  // REQUIRES: one engine, and the model decides.
  const Scheduler& scheduler() const { return *engines_.front().decisions->model(); }
  // All that arrives.
  const Workload& clients() const { return clients_ ? *clients_ : *engines_.front().workload; }

 private:
  explicit Session(const LockstepConfig& config) : config_(config) {}
  Result<void> add_engine(std::int32_t dp_rank, SessionParts& parts);
  static RunParts parts_of(SessionEngine& engine);

  const LockstepConfig config_;
  std::unique_ptr<Workload> clients_;  // of several engines
  std::vector<SessionEngine> engines_;
};

// From the spec of a run, or a saved case, to what runs: configuration, workload, the pool's order.
// And back, so that a replay comes to the same divergence again.

// The run as it was and how it ended; trace or recording are added by the caller.
SavedCase case_of(std::string name, const RunSpec& run, const RunSummary& summary);
// The header and the first `count` records: those that a run had consumed when it ended.
void keep_records(Trace& trace, std::int64_t count);

// Whether the release overlays its groups, and this run's memory can be laid out so: an engine's
// own worker lays out its own.
bool overlays_memory(const RunSpec& run);
// A mutant that is none of the engine's belongs to the backend, which refuses unknown names when it
// is created.
LockstepConfig config_of(const RunSpec& run);
// A recording states the policy for requests whose load fails.
LockstepConfig config_of(const SavedCase& saved);
// The order in which the pool first allocates blocks, shuffled by block_order; empty: an engine's.
std::vector<BlockId> free_order_of(const RunSpec& run);
TraceWorkloadOptions workload_options_of(const RunSpec& run);
// Whether its recorded decisions are followed. `decisions`: of another engine, which then decides.
bool follows_recording(const SavedCase& saved, const DecisionsFactory& decisions = {});
// Its recording step by step, or its trace by the clock; without connectors of the configuration.
std::unique_ptr<Workload> workload_of(const SavedCase& saved);
// The arguments of Session::open() for it, except a backend and observers. `decisions`: absent:
// those that the case says, the model's or the recorded ones.
SessionParts parts_of(const SavedCase& saved, DecisionsFactory decisions = {});
// Its requests on one engine without faults, data parallel ranks and their connectors.
Result<std::unique_ptr<Session>> open_undisturbed(const SavedCase& saved, LockstepConfig config,
                                                  BackendFactory backend, Attach attach,
                                                  DecisionsFactory decisions = {});

}  // namespace lockstep
