// Data parallel ranks: engines with their own scheduler, pool and backends. Requests are
// distributed over them, and they call collectives in every step.
//
// Invariants
// (1) All ranks run every step of a wave, with or without work. An idle rank runs a batch of no
//     request, whose padded tokens write nothing. The backend executes it, and everything is
//     compared as in any other step.
// (2) A request goes to the rank with the least load (LoadBalancer) and stays there. Aborts reach
//     their request, resets of the prefix cache reach all ranks.
// (3) The ranks share one clock: a step takes as long as that of the rank with the most tokens, or
//     with the latest output.
// (4) The calls of each rank in a step are matched before it runs. The first mismatch ends the run:
//     as a divergence, or as a liveness failure if the others wait for a rank. Both name the rank.
// (5) Equal configuration, workload and seed produce the same run. Its state hash covers all ranks.
// (6) Faults of one rank, and transfers of its connector, keep the run from ending, as with one
//     engine.
// (7) With captured graphs the ranks agree on the largest size that any of them would capture or
//     replay, and all run that size. If a rank has more tokens than the largest graph, each keeps
//     its own size and none replays a graph.
//
// Rules: vLLM, v1/engine/core_client.py (DPLBAsyncMPClient), v1/engine/core.py (DPEngineCoreProc).
// EngineProfile has the differences between releases: dp_load, rotates_dp_ties, dp_votes,
// dp_sync_rows.
//
// Not modelled: load balancing by several clients or from stale counts (vLLM publishes them at most
// every 100 ms); expert parallelism beyond its collectives.
#pragma once

#include <cstddef>
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
#include "reference/profiles/engine_profile.h"
#include "sim/engine/lockstep.h"
#include "sim/engine/workload.h"
#include "sim/protocol/backend.h"
#include "sim/protocol/step_program.h"

namespace lockstep {

// The collectives of ranks, and whether they match. Every rank of a group must enter a collective
// with the same kind and shape, in the same order. A rank that calls a different one, or none,
// leaves the others with wrong data or in a deadlock.
//
// Invariants
// (1) Calls are plain values; what a rank runs in a step decides why it makes them.
// (2) The first mismatching call is reported, with both ranks. Calls after it are not checked.
//
// Not checked: what the collectives carry.
enum class CollectiveKind : std::uint8_t { all_reduce, all_gather, reduce_scatter };

// One call, as one rank makes it. Fields of other kinds keep their defaults.
struct Collective {
  CollectiveKind kind = CollectiveKind::all_reduce;
  std::string_view what;            // "tokens of the step", for a person
  std::vector<std::int64_t> shape;  // of one rank's part; all_gather: tokens of each rank
  std::int64_t own = 0;             // all_gather: tokens of this rank
  std::int64_t cut_over = 1;        // reduce_scatter: ranks over which shape[0] is divided
  bool is_own = false;              // True if it runs inside the rank's tensor parallel group
  bool operator==(const Collective&) const = default;
};

// The first call of a step that does not match.
struct UnmetCollective {
  bool hangs = false;  // True if `rank` makes no call while `other` waits; else they mismatch
  std::int32_t rank = 0;
  std::int32_t other = 0;  // rank it is compared with; `rank` itself: an impossible call
  std::int64_t call = 0;   // counted from 0
  std::string what;        // one line
};

// Returns the first mismatch of a step; absent: all calls match. calls[r]: those of rank r, in
// order.
std::optional<UnmetCollective> first_unmet(std::span<const std::vector<Collective>> calls);

// Defects that can be planted in what a rank decides.
enum class DataParallelDefect : std::uint8_t {
  none,
  dp_sync_shape,   // an idle rank exchanges its tokens in a tensor of another shape
  sp_padding,      // an idle rank's tokens are not padded to a multiple of tp
  dp_idle_skips,   // an idle rank makes no calls in a step
  dp_graph_alone,  // a rank with a graph replays it although another rank has none
};
template <>
inline constexpr char kWordJoint<DataParallelDefect> = '-';

struct DataParallelOptions {
  std::int32_t dp_size = 1;    // data_parallel_size
  bool enforce_eager = false;  // no graphs: no rank is padded to the largest one
  DataParallelDefect defect = DataParallelDefect::none;
};

// Returns true if the ranks exchange in this step of a wave whether any has requests left. Steps
// count from 1.
bool is_vote_step(DpVotes votes, std::int64_t step_of_wave);

// Load of one rank.
struct RankLoad {
  std::int64_t waiting = 0;
  std::int64_t running = 0;
  std::int64_t in_flight = 0;  // requests sent to the rank whose end it has not reported
  double cache_usage = 0;      // blocks in use, 0 to 1
};

// Selects the rank of each new request as vLLM's client does: the one with the least load, and on
// ties the first from a rank that may rotate (EngineProfile::rotates_dp_ties).
class LoadBalancer {
 public:
  explicit LoadBalancer(const EngineProfile& profile) : profile_(profile) {}
  // REQUIRES: `loads` has one entry per rank, the same number in every call.
  std::size_t next(std::span<const RankLoad> loads);

 private:
  const EngineProfile& profile_;
  std::size_t first_ = 0;  // wins ties
};

// Sizes that a rank's collectives depend on, equal on all ranks.
struct RankSizes {
  std::int32_t tp_size = 1;
  std::int64_t sync_rows = 0;   // numbers per rank in the exchange (EngineProfile::dp_sync_rows)
  std::int64_t num_layers = 0;  // of the whole model
  std::int64_t max_capture_size = 0;     // tokens; 0: no graphs are captured
  std::int64_t max_tokens_per_step = 0;  // max_num_batched_tokens
};

// Decides what one data parallel rank does for the other ranks in a step: how many tokens it runs,
// and which collectives it calls, in order. Derived as the rank's own worker derives it, from its
// own tokens and from what the ranks exchange.
//
// Invariants
// (1) An idle rank runs one token of no request: the other ranks' expert layers wait for it.
// (2) Token counts are padded for sequence parallelism (to a multiple of tp) before the exchange,
//     and afterwards to the largest of all where graphs run (not enforce_eager).
// (3) With captured graphs, a rank first pads to the size of the graph that takes its tokens, if tp
//     divides that size. If any rank has no graph, none is padded to the largest and none replays a
//     graph: the collectives inside a graph only match if all ranks run its size.
// (4) In some steps of a wave (is_vote_step()) the ranks exchange whether any has requests left. If
//     none has, they pause.
//
// Rules: vLLM 0.22.1, v1/worker/dp_utils.py (_post_process_dp_padding(),
// _post_process_cudagraph_mode()), forward_context.py (DPMetadata). Not decided here: whether the
// calls match (first_unmet(), which shares no code with it).
class DataParallelRank {
 public:
  DataParallelRank(const DataParallelOptions& options, std::int32_t rank, const RankSizes& sizes);

  // Returns the tokens that the rank would run by itself, padding included. Example with tp 4 and
  // no graphs: 0 scheduled tokens give 4, 6 give 8.
  std::int64_t own_tokens(std::int64_t scheduled) const;
  // Returns what the rank runs after the exchange of own_tokens() of all ranks, in rank order.
  AgreedBatch agreed_batch(std::span<const std::int64_t> own_tokens) const;
  // Returns the rank's calls in a step of a wave. `votes`: the step exchanges whether any rank is
  // unfinished.
  std::vector<Collective> calls(std::int64_t scheduled, std::span<const std::int64_t> own_tokens,
                                bool votes) const;

 private:
  // Returns the size of the graph that takes `tokens`; 0: none does, or tp does not divide it.
  std::int64_t graph_size(std::int64_t tokens) const;
  // own_tokens() has already padded to a graph, so a rank has a graph exactly if its tokens fill
  // one.
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
  DealtWorkload& dealt;  // the rank's share of the requests
  RunParts run;          // its workload is that share, or a wrapper of it
};

// Runs all engines on one workload. An observer that returns false ends the run of all engines.
// REQUIRES: options.dp_size engines; a workload without a script and without a connector, since
// each engine has its own connector, which wraps its share of the workload.
Result<RunReport> run_data_parallel(const RunConfig& config, const DataParallelOptions& options,
                                    std::span<const EngineParts> engines, Workload& workload);

// One rank's share of the workload of data parallel ranks.
//
// Invariants
// (1) It receives the rank's share and answers for its own requests. It forwards an abort only
//     while the rank has the request: until the step after the one in which it ended, because the
//     client may not know the end earlier.
// (2) When all ranks have completed the step, it reports its ended requests and the step's duration
//     to the shared workload. Before that, the end of one rank's request could change what another
//     rank receives in the same step.
class DealtWorkload final : public Workload {
 public:
  // REQUIRES: `all` outlives the object.
  explicit DealtWorkload(Workload& all) : all_(all) {}

  std::vector<std::string_view> features() const override { return all_.features(); }
  // Adds an event to the rank's next turn.
  void deal(WorkloadEvent event);
  // Requests added since the rank's last turn. They count as waiting for the load balance.
  std::int64_t num_dealt_requests() const;
  // Requests whose end has not been passed on.
  std::int64_t num_in_flight() const { return num_in_flight_; }
  // Returns true if an abort of the request belongs to this rank.
  bool knows(std::string_view request) const { return names_.find(request) != names_.end(); }
  // Forwards the reports of a step to the shared workload. REQUIRES: all ranks have completed it.
  void pass_on();

  // Returns the events that were added since the last turn; always Turn::step, since only the
  // shared workload ends the run.
  Result<Turn> next_turn(const LoopState& state, std::vector<WorkloadEvent>& events) override;
  Result<void> sample(std::int64_t step, std::span<const SampledRow> rows,
                      ModelOutput& output) override {
    return all_.sample(step, rows, output);
  }
  void step_done(std::int64_t) override {}
  // Stores the end until all ranks have completed the step: invariant (2).
  void request_left(std::string_view name, std::uint64_t ticket) override;
  std::int64_t now_ns() const override { return all_.now_ns(); }
  void advance_to(std::int64_t now_ns) override;
  std::int64_t records_consumed() const override { return all_.records_consumed(); }

 private:
  Workload& all_;
  std::vector<WorkloadEvent> dealt_;                         // for the next turn
  std::set<std::string, std::less<>> names_;                 // requests that an abort can reach
  std::vector<std::pair<std::string, std::uint64_t>> left_;  // ended in the current step
  std::vector<std::string> left_before_;                     // ended in the previous step
  std::int64_t num_in_flight_ = 0;
  std::int64_t until_ns_ = 0;  // the step does not end earlier
};

}  // namespace lockstep
