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
// (DPEngineCoreProc). collectives.h, independent of this file, decides whether the calls match.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "sim/protocol/step_program.h"
#include "sim/ranks/collectives.h"

namespace lockstep {

// Planted in what a rank decides.
enum class DataParallelDefect : std::uint8_t {
  none,
  dp_sync_shape,   // an idle rank tells the others its tokens in a tensor of another shape
  sp_padding,      // an idle rank's tokens are not padded to a multiple of tp
  dp_idle_skips,   // an idle rank sits the step out
  dp_graph_alone,  // a rank with a graph replays it although another rank has none
};
std::string_view name_of(DataParallelDefect defect);
std::optional<DataParallelDefect> data_parallel_defect_from_name(std::string_view name);
std::span<const DataParallelDefect> data_parallel_defects();

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

}  // namespace lockstep
