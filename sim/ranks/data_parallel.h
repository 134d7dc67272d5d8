// Data parallel ranks: engines with their own scheduler, pool and backends, over which the requests
// are distributed, and which call collectives in every step.
//
// Invariants
// (1) All ranks run every step of a wave, with or without work. An idle rank runs a batch of no
//     request, whose padded tokens write nothing. The backend executes it, and everything is
//     compared as in any other step.
// (2) A request goes to the rank with the least load (4 * waiting + running), the lowest rank on
//     ties, and stays there. Aborts reach their request, resets of the prefix cache reach all
//     ranks.
// (3) The ranks share one clock: a step takes as long as that of the rank with the most tokens, or
//     with the latest output.
// (4) The calls of each rank in a step (dp_step.h) are matched (collectives.h) before it runs. The
//     first mismatch ends the run: a mismatch is a divergence, a rank that the others wait for is a
//     liveness failure. Both name the rank.
// (5) Same configuration, workload and seed: same run. Its state hash covers all ranks'.
// (6) Faults of one rank, and transfers of its connector, keep the run from ending, as with one
//     engine.
// (7) With captured graphs the ranks agree on the largest size that any of them would capture or
//     replay, and all run that size. If a rank has more tokens than the largest graph, each keeps
//     its own size and none replays a graph.
//
// Not modelled: load balancing from stale counts, and expert parallelism beyond its collectives.
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
  DealtWorkload& dealt;  // its share of the requests
  RunParts run;          // its workload: that share, or what wraps it
};

// REQUIRES: options.dp_size engines; a workload without a script and without a connector: each
// engine has its own connector, which wraps its share of the workload. False from an observer ends
// the run of all engines.
Result<RunReport> run_data_parallel(const RunConfig& config, const DataParallelOptions& options,
                                    std::span<const EngineParts> engines, Workload& workload);

// The workload of data parallel ranks, as one rank sees it.
//
// Invariants
// (1) It receives the rank's share and answers for its own requests. It forwards an abort only
//     while the rank has the request: until the step after the one in which it ended.
// (2) When all ranks have completed the step, it reports its ended requests and the step's duration
//     to the shared workload.

class DealtWorkload final : public Workload {
 public:
  // `all` must outlive it.
  explicit DealtWorkload(Workload& all) : all_(all) {}

  // For the next turn.
  void deal(WorkloadEvent event);
  std::int64_t num_dealt_requests() const;
  bool knows(std::string_view request) const { return names_.find(request) != names_.end(); }
  // All ranks have completed the step: forwards the reports to `all`.
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
  std::vector<std::pair<std::string, std::uint64_t>> left_;  // ended in the current step
  std::vector<std::string> left_before_;                     // ended in the previous step
  std::int64_t until_ns_ = 0;                                // the step lasts at least
};

}  // namespace lockstep
