// Data parallel ranks: engines with a scheduler, a pool and backends of their own, among which the
// requests are dealt out, and which meet in collectives in every step.
//
// (1) All ranks run every step of a wave, with or without work: an idle one runs a batch that
//     belongs to nobody, whose padded tokens write nothing. The backend executes it, and everything
//     is compared as in any other step.
// (2) A request goes to the rank with the least load (4 * waiting + running), of equal ones the
//     lowest; it stays there. Aborts find theirs, resets of the prefix cache reach all.
// (3) There is one clock: a step takes as long as the rank with the most tokens takes, or the one
//     whose output is latest.
// (4) What each rank would call in a step (dp_step.h) is put side by side (collectives.h) before it
//     runs. The first call that does not meet ends the run: a mismatch is a divergence, a rank that
//     the others wait for is a matter of liveness. Both name the rank.
// (5) Same configuration, workload and seed: same run; its state hash is made of all ranks'.
// (6) What hinders one rank (faults), or what its connector has under way, keeps the run from its
//     end, as it does one engine's.
// (7) With captured graphs the ranks agree on the largest size that any of them would capture or
//     replay, and all run that one; where a rank has more tokens than the largest graph takes, each
//     keeps its own, and nobody replays a graph.
//
// Not modelled: who balances load from stale counts, and expert parallelism beyond its collectives.
// Rules: vllm/v1/engine/core_client.py (DPLBAsyncMPClient), v1/engine/core.py (DPEngineCoreProc).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/result.h"
#include "sim/engine/decision_source.h"
#include "sim/engine/lockstep.h"
#include "sim/engine/workload.h"
#include "sim/protocol/backend.h"
#include "sim/ranks/dealt_workload.h"

namespace lockstep {

// What one data parallel rank runs on. All of it must outlive the run.
struct EngineParts {
  DecisionSource* decisions = nullptr;
  std::vector<Backend*> ranks;  // as in run_lockstep(); none: the decisions alone
  // What is dealt out to it, and what stands between that and the engine (a recorder, faults): the
  // run deals to the one and asks the other. Null: nobody stands there.
  DealtWorkload* dealt = nullptr;
  Workload* workload = nullptr;
  StepObserver* observer = nullptr;  // may be null; false from it ends the run of all
};

// REQUIRES: config.data_parallel.dp_size engines; a workload without a script, and without a
// connector: each engine has its own, between what is dealt out to it and the engine.
Result<RunReport> run_data_parallel(const LockstepConfig& config,
                                    std::span<const EngineParts> engines, Workload& workload);

}  // namespace lockstep
