#include "sim/ranks/collectives.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "base/check.h"
#include "base/names.h"

namespace lockstep {
namespace {

std::string text_of(const Collective& call) {
  return fmt::format("{} of [{}] ({})", name_of(call.kind), fmt::join(call.shape, ", "), call.what);
}

// What no rank of any group would take.
std::optional<std::string> why_impossible(const Collective& call, std::size_t rank) {
  if (call.kind == CollectiveKind::reduce_scatter && call.shape.front() % call.cut_over != 0)
    return fmt::format("{} cannot be divided among {} ranks: {} % {} is {}", text_of(call),
                       call.cut_over, call.shape.front(), call.cut_over,
                       call.shape.front() % call.cut_over);
  if (call.kind == CollectiveKind::all_gather &&
      (rank >= call.shape.size() || call.shape[rank] != call.own))
    return fmt::format("{}: the rank brings {}", text_of(call), call.own);
  return std::nullopt;
}

bool meets(const Collective& one, const Collective& other) {
  if (one.is_own && other.is_own) return one.kind == other.kind;
  return one.kind == other.kind && one.is_own == other.is_own && one.shape == other.shape;
}

constexpr auto kKinds = std::to_array<Named<CollectiveKind>>({
    {CollectiveKind::all_reduce, "all_reduce"},
    {CollectiveKind::all_gather, "all_gather"},
    {CollectiveKind::reduce_scatter, "reduce_scatter"},
});

}  // namespace

std::string_view name_of(CollectiveKind kind) { return name_in(kKinds, kind); }

std::optional<UnmetCollective> first_unmet(std::span<const std::vector<Collective>> calls) {
  std::size_t longest = 0;
  for (const auto& of_rank : calls) longest = std::max(longest, of_rank.size());
  for (std::size_t i = 0; i < longest; ++i) {
    // The first rank that makes an i-th call at all waits in it for the others.
    const auto waiting = std::ranges::find_if(
        calls, [&](const std::vector<Collective>& of_rank) { return i < of_rank.size(); });
    const auto waits = static_cast<std::int32_t>(waiting - calls.begin());
    const Collective& call = (*waiting)[i];
    for (std::size_t rank = 0; rank < calls.size(); ++rank) {
      const auto number = static_cast<std::int32_t>(rank);
      if (i >= calls[rank].size())
        return UnmetCollective{
            .hangs = true,
            .rank = number,
            .other = waits,
            .call = static_cast<std::int64_t>(i),
            .what = fmt::format("rank {} waits in call {}, {}, and rank {} makes "
                                "none",
                                waits, i, text_of(call), number)};
      const Collective& own = calls[rank][i];
      if (!meets(own, call))
        return UnmetCollective{.rank = number,
                               .other = waits,
                               .call = static_cast<std::int64_t>(i),
                               .what = fmt::format("call {} of rank {} is {}, and rank {} makes {}",
                                                   i, waits, text_of(call), number, text_of(own))};
      if (auto why = why_impossible(own, rank))
        return UnmetCollective{.rank = number,
                               .other = number,
                               .call = static_cast<std::int64_t>(i),
                               .what = fmt::format("call {} of rank {}, {}", i, number, *why)};
    }
  }
  return std::nullopt;
}

}  // namespace lockstep
