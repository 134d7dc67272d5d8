// A run, assembled from its description: arrivals, connectors, faults, decision source, backends
// and observers. One engine, or one per data parallel rank.
//
// The workload passes through these wrappers; each reads the previous one:
// clients -> (share of a data parallel rank) -> connectors -> faults -> Onlooker -> the loop
//
// Invariants
// (1) A session owns everything it runs, except what its parts declare as borrowed. Its description
//     may be destroyed once it is open.
// (2) Equal descriptions produce equal runs.
// (3) Opening returns the errors of faults, scheduler and backends, in this order, engine by
//     engine; run() and start() return those of the loop.
//
// REQUIRES: check_setup() has passed. Not checked: that a backend matches the plan (the comparison
// does).
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

// The configuration of a run: its engines' loops, their extensions, and planted defects. At most
// one defect is set.
struct LockstepConfig : RunConfig {
  SchedulerDefect scheduler_defect = SchedulerDefect::none;
  ConnectorConfig connector;          // for a workload without its own connector
  DataParallelOptions data_parallel;  // several engines
  HiddenStateDefect hidden_state_defect = HiddenStateDefect::none;
  bool draw = false;  // collect a timeline
};

// Returns what the configuration states. A connector that the workload itself has is not included.
RunFacts facts_of(const LockstepConfig& config);
// Refuses what the table of compatibility.h refuses of the configuration together with `more`,
// numbers of engines and ranks outside their limits, and layouts that the plan cannot have.
Result<void> check_setup(const LockstepConfig& config, RunTraits more = {});

// Creates the backend of one rank; null: the run has decisions only. Errors: a plan, a
// configuration or a mutant that the backend does not support.
using BackendFactory = std::function<Result<std::unique_ptr<Backend>>(const BackendConfig& config)>;

// Wraps an engine's workload, or observes the engine. It outlives the session; each member may be
// null.
struct Onlooker {
  Workload* workload = nullptr;      // replaces the workload passed to Attach
  KVConnector* connector = nullptr;  // replaces the workload's connector
  StepObserver* observer = nullptr;
};
// Called once per engine while it is assembled. `workload`: the engine's own, with connectors and
// faults; null if SessionParts::clients is null.
using Attach = std::function<Onlooker(std::int32_t dp_rank, Workload* workload)>;

// Everything that a session receives apart from its configuration.
struct SessionParts {
  // All arrivals, without connectors of the configuration. Null: `attach` supplies the workload.
  std::unique_ptr<Workload> clients;
  std::uint64_t connector_seed = 0;  // each engine derives its own seed from it
  std::vector<Fault> faults;         // every engine has all of them
  std::vector<BlockId> free_order;   // Scheduler::order_free_blocks(); empty: engine's order
  // Absent: the model's scheduler. A factory is refused together with faults or free_order, because
  // only the model supports them.
  DecisionsFactory decisions;
  // Called for each rank of each engine. Absent, or returning null: decisions only.
  BackendFactory backend;
  std::vector<Backend*> borrowed;  // instead of `backend`, for one engine; they outlive it
  Attach attach;
};

// One engine, assembled. The members are in order of construction; later ones refer to earlier
// ones.
struct SessionEngine {
  std::unique_ptr<Workload> owned;         // arrivals, with connectors and faults
  Workload* workload = nullptr;            // `owned`, or the Onlooker's
  DealtWorkload* dealt = nullptr;          // of several engines
  const FaultyWorkload* faulty = nullptr;  // null: no faults
  std::unique_ptr<DecisionSource> decisions;
  std::vector<std::unique_ptr<Backend>> backends;
  std::vector<Backend*> ranks;  // `backends` or the borrowed ones
  ObserverList observers;
  std::unique_ptr<HiddenStateCheck> hidden_states;
  std::unique_ptr<RankUnion> together;
  std::vector<MemoryCheck*> checks;          // the two above, and check()'s
  std::unique_ptr<TimelineRecorder> drawer;  // null unless LockstepConfig::draw
};

// Creates a backend for each rank of memory, in rank order. Ranks for which the factory returns
// null are left out, so the result is complete or empty.
Result<std::vector<std::unique_ptr<Backend>>> open_backends(const BackendConfig& config,
                                                            const BackendFactory& factory);

// A run that is assembled and then executed once.
class Session {
 public:
  // Assembles the engines: invariant (3). No step runs.
  static Result<std::unique_ptr<Session>> open(const LockstepConfig& config, SessionParts parts);

  // Adds an observer. REQUIRES: before the run; `observer` outlives the session.
  void observe(std::int32_t dp_rank, StepObserver& observer);
  // Adds a check, called in each step after the comparison. REQUIRES: before the run; `check`
  // outlives the session.
  void check(std::int32_t dp_rank, MemoryCheck& check);
  // Sets the receiver of the hidden states of finished requests, after their comparison. REQUIRES:
  // before the run.
  void give_hidden_states(const HiddenStateCheck::Sink& sink);
  // Runs to the end. REQUIRES: called once, and not after start().
  Result<RunReport> run();
  // Prepares a run that the caller advances step by step. REQUIRES: one engine.
  Result<std::unique_ptr<LockstepRun>> start();
  // Returns the timeline of an engine. REQUIRES: after the run; LockstepConfig::draw.
  Timeline take_timeline(std::int32_t dp_rank);

  const LockstepConfig& config() const { return config_; }
  std::span<const SessionEngine> engines() const { return engines_; }
  // Returns the model's scheduler. REQUIRES: one engine, whose decisions are the model's.
  const Scheduler& scheduler() const { return *engines_.front().decisions->model(); }
  // Returns the workload with all arrivals.
  const Workload& clients() const { return clients_ ? *clients_ : *engines_.front().workload; }

 private:
  explicit Session(const LockstepConfig& config) : config_(config) {}
  // Assembles one engine from the parts that all engines share.
  Result<void> add_engine(std::int32_t dp_rank, SessionParts& parts);
  // REQUIRES: called once per engine, since it adds the timeline's recorder to the observers.
  static RunParts parts_of(SessionEngine& engine);

  const LockstepConfig config_;
  std::unique_ptr<Workload> clients_;  // with several engines, else null
  std::vector<SessionEngine> engines_;
};

// The functions below translate a run's spec or a saved case into configuration, workload and block
// order, and back. A replay of the resulting case ends in the same divergence.
//
// Returns the run as a saved case with the verdict that it had. The caller adds the trace or
// recording.
SavedCase case_of(std::string name, const RunSpec& run, const RunSummary& summary);
// Keeps the header and the first `count` records: those that a run had consumed when it ended. Does
// nothing if the trace is shorter.
void keep_records(Trace& trace, std::int64_t count);

// Returns true if the release overlays its groups and this run can use that layout. An engine's own
// worker has its own layout.
bool overlays_memory(const RunSpec& run);
// Returns the configuration of a run. Only the first mutant is planted. An unknown name belongs to
// the backend, which refuses it when it is created.
LockstepConfig config_of(const RunSpec& run);
// Returns the configuration of a saved case. A recording with a connector states the policy for
// requests whose load fails.
LockstepConfig config_of(const SavedCase& saved);
// Returns the order in which the pool first allocates its blocks, shuffled by block_order; empty:
// the engine's order.
std::vector<BlockId> free_order_of(const RunSpec& run);
TraceWorkloadOptions workload_options_of(const RunSpec& run);
// Returns true if the case's recorded decisions are followed. `decisions`: of another engine, which
// then decides.
bool follows_recording(const SavedCase& saved, const DecisionsFactory& decisions = {});
// Returns the arrivals of a case: its recording step by step, or its trace by the clock. Connectors
// of the configuration are not included.
std::unique_ptr<Workload> workload_of(const SavedCase& saved);
// Returns the arguments of Session::open() for a case, without backend and observers. Without
// `decisions`, the case states whether the model or the recording decides.
SessionParts parts_of(const SavedCase& saved, DecisionsFactory decisions = {});
// Opens a session with the case's requests on one engine, without faults, data parallel ranks and
// their connectors: the undisturbed run that others are compared with.
Result<std::unique_ptr<Session>> open_undisturbed(const SavedCase& saved, LockstepConfig config,
                                                  BackendFactory backend, Attach attach,
                                                  DecisionsFactory decisions = {});

}  // namespace lockstep
