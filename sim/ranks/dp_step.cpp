#include "sim/ranks/dp_step.h"

#include <algorithm>
#include <array>
#include <utility>

#include "base/check.h"
#include "base/names.h"
#include "sim/step/backend_config.h"

namespace lockstep {
namespace {

constexpr auto kDataParallelDefects = std::to_array<Named<DataParallelDefect>>({
    {DataParallelDefect::dp_sync_shape, "dp-sync-shape"},
    {DataParallelDefect::sp_padding, "sp-padding"},
    {DataParallelDefect::dp_idle_skips, "dp-idle-skips"},
    {DataParallelDefect::dp_graph_alone, "dp-graph-alone"},
});
constexpr auto kAllDefects = values_in(kDataParallelDefects);

}  // namespace

std::string_view name_of(DataParallelDefect defect) {
  return name_in(kDataParallelDefects, defect, "");
}

std::optional<DataParallelDefect> data_parallel_defect_from_name(std::string_view name) {
  return value_in(kDataParallelDefects, name);
}

std::span<const DataParallelDefect> data_parallel_defects() { return kAllDefects; }

DataParallelRank::DataParallelRank(const DataParallelOptions& options, std::int32_t rank,
                                   const RankSizes& sizes)
    : options_(options), rank_(rank), sizes_(sizes) {}

std::int64_t DataParallelRank::graph_size(std::int64_t tokens) const {
  if (sizes_.max_capture_size == 0) return 0;
  const std::int64_t size =
      captured_batch(tokens, sizes_.max_capture_size, sizes_.max_tokens_per_step);
  return size % sizes_.tp_size == 0 ? size : 0;
}

std::int64_t DataParallelRank::own_tokens(std::int64_t scheduled) const {
  const bool idle = scheduled == 0;
  if (idle && options_.defect == DataParallelDefect::sp_padding) return 1;
  const std::int64_t tokens = idle ? 1 : scheduled;
  const std::int64_t padded = (tokens + sizes_.tp_size - 1) / sizes_.tp_size * sizes_.tp_size;
  const std::int64_t size = graph_size(padded);
  return size > 0 ? size : padded;
}

AgreedBatch DataParallelRank::agreed_batch(std::span<const std::int64_t> own_tokens) const {
  LS_CHECK(std::ssize(own_tokens) == options_.dp_size, "{} ranks", own_tokens.size());
  const bool pads = pads_to_largest(own_tokens);
  const std::int64_t own = own_tokens[rank_];
  const std::int64_t tokens = pads ? std::ranges::max(own_tokens) : own;
  return {.num_tokens = static_cast<std::int32_t>(tokens),
          .is_eager = sizes_.max_capture_size > 0 && !pads && !replays_alone(own_tokens)};
}

// Planted: it does not ask what the others have.
bool DataParallelRank::replays_alone(std::span<const std::int64_t> own_tokens) const {
  return options_.defect == DataParallelDefect::dp_graph_alone && sizes_.max_capture_size > 0 &&
         !pads_to_largest(own_tokens) && has_graph(own_tokens[rank_]);
}

bool DataParallelRank::pads_to_largest(std::span<const std::int64_t> own_tokens) const {
  if (options_.enforce_eager) return false;
  if (sizes_.max_capture_size == 0) return true;
  return std::ranges::all_of(own_tokens, [this](std::int64_t tokens) { return has_graph(tokens); });
}

std::vector<Collective> DataParallelRank::calls(std::int64_t scheduled,
                                                std::span<const std::int64_t> own_tokens,
                                                bool votes) const {
  const bool idle = scheduled == 0;
  if (idle && options_.defect == DataParallelDefect::dp_idle_skips) return {};
  const bool other_tensor = idle && options_.defect == DataParallelDefect::dp_sync_shape;
  std::vector<Collective> calls;
  calls.push_back({.kind = CollectiveKind::all_reduce,
                   .what = "what each rank is about to run",
                   .shape = {other_tensor ? 2 : sizes_.sync_rows, options_.dp_size}});
  const std::int64_t tokens = agreed_batch(own_tokens).num_tokens;
  std::vector<std::int64_t> of_all(own_tokens.begin(), own_tokens.end());
  // The calls of a graph are those of the ranks that it was captured with: all ran its size.
  if (pads_to_largest(own_tokens) || replays_alone(own_tokens)) std::ranges::fill(of_all, tokens);
  for (std::int64_t layer = 0; layer < sizes_.num_layers; ++layer) {
    calls.push_back({.kind = CollectiveKind::all_gather,
                     .what = "tokens to the experts",
                     .shape = of_all,
                     .own = tokens});
    calls.push_back({.kind = CollectiveKind::reduce_scatter,
                     .what = "rows of a layer, sequence parallel",
                     .shape = {tokens},
                     .cut_over = sizes_.tp_size,
                     .is_own = true});
  }
  if (votes)
    calls.push_back(
        {.kind = CollectiveKind::all_reduce, .what = "ranks with requests left", .shape = {1}});
  return calls;
}

}  // namespace lockstep
