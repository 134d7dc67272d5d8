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
// (4) The calls of each rank in a step are matched before it runs. The first mismatch ends
//     the run: as a divergence, or as a liveness failure if the others wait for a rank. Both name
//     the rank.
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
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/names.h"
#include "base/result.h"
#include "sim/engine/lockstep.h"
#include "sim/engine/workload.h"
#include "sim/protocol/backend.h"
#include "sim/protocol/step_program.h"

namespace lockstep {

// What a data parallel rank does for the other ranks in one step: how many tokens it runs, and
// which collectives it calls, in order. Written as the rank's own worker decides it, from its own
// tokens and from what the ranks exchange.
//
// Invariants
// (1) An idle rank runs one token of no request: the others' experts need it.
// (2) Token counts are padded for sequence parallelism (to a multiple of tp) before the exchange,
//     and afterwards to the largest of all where graphs run (not enforce_eager).
// (3) With captured graphs a rank first pads to the size of the graph that takes its tokens, if tp
//     divides it. If a rank has no graph, none is padded to the largest and none replays a graph: a
//     graph's collectives belong to ranks that all run its size.
// (4) Every 32nd step of a wave the ranks exchange whether any has requests left; if none has, they
//     pause.
//
// Rules: vllm/v1/worker/dp_utils.py, vllm/forward_context.py (DPMetadata), vllm/v1/engine/core.py
// (DPEngineCoreProc). An independent check below decides whether the calls match.

// The collectives of ranks, and whether they match. Every rank of a group enters a collective with
// the same kind and shape, in the same order. A rank that calls a different one, or none, leaves
// the others with wrong data or a deadlock.
//
// Invariants
// (1) Calls are plain values; what a rank runs in a step decides why it makes them.
// (2) The first mismatching call is reported, with both ranks. Calls after it are not judged.
//
// Not checked: what the collectives carry.

enum class CollectiveKind : std::uint8_t { all_reduce, all_gather, reduce_scatter };

struct Collective {
  CollectiveKind kind = CollectiveKind::all_reduce;
  std::string what;                 // "tokens of the step", for a person
  std::vector<std::int64_t> shape;  // of one rank's part; all_gather: what each rank brings
  std::int64_t own = 0;             // all_gather: what this rank brings; 0: not said
  std::int64_t cut_over = 1;        // reduce_scatter: ranks that shape[0] is divided among
  bool is_own = false;  // of the rank's own group (its tensor parallel ranks): only there it meets
  bool operator==(const Collective&) const = default;
};

// Why a step's calls do not meet.
struct UnmetCollective {
  bool hangs = false;  // a rank calls nothing where another waits; otherwise they mismatch
  std::int32_t rank = 0;
  std::int32_t other = 0;  // the rank that it does not meet; itself: no rank would take the call
  std::int64_t call = 0;   // counted from 0
  std::string what;        // one line
};

// calls[r]: those of rank r in one step, in order.
std::optional<UnmetCollective> first_unmet(std::span<const std::vector<Collective>> calls);

// Planted in what a rank decides.
enum class DataParallelDefect : std::uint8_t {
  none,
  dp_sync_shape,   // an idle rank tells the others its tokens in a tensor of another shape
  sp_padding,      // an idle rank's tokens are not padded to a multiple of tp
  dp_idle_skips,   // an idle rank sits the step out
  dp_graph_alone,  // a rank with a graph replays it although another rank has none
};
template <>
inline constexpr char kWordJoint<DataParallelDefect> = '-';

struct DataParallelOptions {
  std::int32_t dp_size = 1;    // data_parallel_size
  bool enforce_eager = false;  // no graphs: nothing is padded to the largest rank
  DataParallelDefect defect = DataParallelDefect::none;
};

inline constexpr std::int64_t kStepsBetweenVotes = 32;

struct RankSizes {
  std::int32_t tp_size = 1;
  std::int64_t sync_rows = 0;  // numbers that a rank tells the others (EngineProfile::dp_sync_rows)
  std::int64_t num_layers = 0;
  std::int64_t max_capture_size = 0;  // tokens; 0: no graphs are captured
  std::int64_t max_tokens_per_step = 0;
};

class DataParallelRank {
 public:
  DataParallelRank(const DataParallelOptions& options, std::int32_t rank, const RankSizes& sizes);

  // Before the exchange: the tokens that it would run by itself.
  std::int64_t own_tokens(std::int64_t scheduled) const;
  // What it runs after it has heard own_tokens() of all.
  AgreedBatch agreed_batch(std::span<const std::int64_t> own_tokens) const;
  // Its calls in a step of a wave; `votes`: the step exchanges whether any rank is unfinished.
  std::vector<Collective> calls(std::int64_t scheduled, std::span<const std::int64_t> own_tokens,
                                bool votes) const;

 private:
  // Size of the graph that takes `tokens`; 0: none.
  std::int64_t graph_size(std::int64_t tokens) const;
  bool has_graph(std::int64_t own_tokens) const { return graph_size(own_tokens) == own_tokens; }
  bool replays_alone(std::span<const std::int64_t> own_tokens) const;
  bool pads_to_largest(std::span<const std::int64_t> own_tokens) const;

  const DataParallelOptions options_;
  const std::int32_t rank_;
  const RankSizes sizes_;
};

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
