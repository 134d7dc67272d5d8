// Data parallel ranks: engines with a scheduler, a pool and backends of their own, among which the
// requests are dealt out, and which meet in collectives in every step.
//
// (1) All ranks run every step of a wave, with or without work: an idle one runs a batch that
//     belongs to no request, and padded tokens write nothing. The backend executes it, and
//     everything is compared as in any other step.
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
//     keeps its own, and none replays a graph.
//
// Not modelled: who balances load from stale counts, and expert parallelism beyond its collectives.
// Rules: vllm/v1/engine/core_client.py (DPLBAsyncMPClient), v1/engine/core.py (DPEngineCoreProc).
#pragma once

#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/result.h"
#include "sim/engine/lockstep.h"
#include "sim/engine/workload.h"
#include "sim/protocol/backend.h"
#include "sim/ranks/dp_step.h"

namespace lockstep {

class DealtWorkload;

// What one data parallel rank runs on. All of it outlives the run.
struct EngineParts {
  DealtWorkload& dealt;  // what is dealt out to it
  RunParts run;          // its workload: `dealt`, or what stands between it and the engine
};

// REQUIRES: options.dp_size engines; a workload without a script, and without a connector: each
// engine has its own, between what is dealt out to it and the engine. False from an observer ends
// the run of all.
Result<RunReport> run_data_parallel(const RunConfig& config, const DataParallelOptions& options,
                                    std::span<const EngineParts> engines, Workload& workload);

// The workload of data parallel ranks as one of them sees it.
//
// (1) It is given what is dealt out to it, and answers for its own requests. An abort is for
//     the rank that has the request: until the step after the one in which it left.
// (2) Of its requests that have left, the workload of all hears when all ranks are through with the
//     step; so it does of how long the step has taken.

class DealtWorkload final : public Workload {
 public:
  // `all` must outlive it.
  explicit DealtWorkload(Workload& all) : all_(all) {}

  // For the next turn.
  void deal(WorkloadEvent event);
  std::int64_t num_dealt_requests() const;
  bool knows(std::string_view request) const { return names_.find(request) != names_.end(); }
  // All ranks are through with the step: tells `all` what it was told.
  void pass_on();

  Result<Turn> next_turn(const LoopState& state, std::vector<WorkloadEvent>& events) override;
  Result<void> sample(std::int64_t step, std::span<const SampledRow> rows,
                      ModelOutput& output) override {
    return all_.sample(step, rows, output);
  }
  void step_done(std::int64_t) override {}
  void request_left(std::string_view name, std::uint64_t ticket) override;
  std::int64_t now_ns() const override { return all_.now_ns(); }
  void advance_to(std::int64_t now_ns) override;
  std::int64_t records_consumed() const override { return all_.records_consumed(); }

 private:
  Workload& all_;
  std::vector<WorkloadEvent> dealt_;
  std::set<std::string, std::less<>> names_;
  std::vector<std::pair<std::string, std::uint64_t>> left_;  // in the step at hand
  std::vector<std::string> left_before_;                     // in the step before
  std::int64_t until_ns_ = 0;                                // the step lasts at least
};

}  // namespace lockstep
