#include "properties/audit/hit_ledger.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

namespace lockstep {

std::string_view name_of(HitLoss loss) {
  constexpr std::string_view kNames[kHitLosses] = {
      "reading off", "group",     "last token",  "alignment", "EAGLE",   "window",
      "state",       "retention", "unexplained", "evicted",   "cleared",
  };
  return kNames[static_cast<std::size_t>(loss)];
}

HitTotals& HitTotals::operator+=(const HitTotals& other) {
  lookups += other.lookups;
  tokens += other.tokens;
  there += other.there;
  hit += other.hit;
  for (std::size_t i = 0; i < kHitLosses; ++i) lost[i] += other.lost[i];
  return *this;
}

bool HitLedger::still_holds(BlockId block, std::size_t group, std::uint64_t content) const {
  if (block == kNullBlock || !pool_.belongs_to(block, static_cast<std::int32_t>(group)))
    return false;
  return is_state(spec_of(group)) ? pool_.state(block).content == content
                                  : pool_.read(block, block_size(group) - 1).content == content;
}

void HitLedger::note(std::size_t group, std::uint64_t content, BlockId block) {
  LS_CHECK(group < places_.size(), "group {} of {}", group, places_.size());
  if (content == 0) return;
  auto& places = places_[group];
  Place& place = places[content];
  if (place.block != block) place.block_before = std::exchange(place.block, block);
  place.epoch = epoch_;
  if (places.size() < num_places_max_[group]) return;
  std::erase_if(places, [&](const auto& of) {
    return !still_holds(of.second.block, group, of.first) &&
           !still_holds(of.second.block_before, group, of.first);
  });
  num_places_max_[group] = std::max(num_places_max_[group], 2 * places.size());
}

HitLedger::Presence HitLedger::presence_of(std::size_t group, std::uint64_t content) const {
  const auto found = places_[group].find(content);
  if (found == places_[group].end()) return Presence::never;
  const bool is_there = still_holds(found->second.block, group, content) ||
                        still_holds(found->second.block_before, group, content);
  if (!is_there) return Presence::evicted;
  return found->second.epoch == epoch_ ? Presence::there : Presence::cleared;
}

// First tokens of the request that a group of full attention has blocks of. Adds to `gone` the
// tokens after them that it once had.
std::int32_t HitLedger::reach_of(const AuditRequest& request, std::size_t group,
                                 std::array<std::int64_t, kHitLosses>& gone) const {
  const std::int32_t size = block_size(group);
  std::int32_t end = size;
  const auto presence = [&] {
    return presence_of(group, request.contents[static_cast<std::size_t>(end) - 1]);
  };
  while (end <= std::ssize(request.contents) && presence() == Presence::there) end += size;
  const std::int32_t reach = end - size;
  for (; end <= std::ssize(request.contents); end += size) {
    const Presence was = presence();
    if (was == Presence::never) break;
    if (was == Presence::evicted) gone[static_cast<std::size_t>(HitLoss::evicted)] += size;
    if (was == Presence::cleared) gone[static_cast<std::size_t>(HitLoss::cleared)] += size;
  }
  return reach;
}

// True if the group allows a hit to end after token `end`.
bool HitLedger::can_end(const AuditRequest& request, std::size_t group, std::int32_t end) const {
  const KVCacheSpec& spec = spec_of(group);
  if (end == 0 || keeps_all_tokens(spec) || is_ring(spec) || spec.bounded_replay) return true;
  const auto content_before = [&](std::int32_t position) {
    return request.contents[static_cast<std::size_t>(position) - 1];
  };
  if (is_state(spec)) return presence_of(group, content_before(end)) == Presence::there;
  const std::int32_t size = block_size(group);
  if (end % size != 0) return false;
  for (std::int32_t last = setup_.first_read(group, end) / size * size + size; last <= end;
       last += size)
    if (presence_of(group, content_before(last)) != Presence::there) return false;
  return true;
}

// True if all groups of states, or all others, allow it.
bool HitLedger::can_end(const AuditRequest& request, std::int32_t end, bool states) const {
  for (std::size_t g = 0; g < num_groups(); ++g)
    if (is_state(spec_of(g)) == states && !can_end(request, g, end)) return false;
  return true;
}

// A draft model computes the last block of a hit again. Where hashes look ahead, it needs the same
// tokens after the hit's end instead.
std::int32_t HitLedger::end_for_draft_model(const AuditRequest& request, std::int32_t end) const {
  const bool drops = setup_.drops_last_block;
  if (end == 0 || (!drops && setup_.hash_lookahead == 0)) return end;
  const auto last = static_cast<std::size_t>(end + setup_.hash_lookahead - 1);
  const auto continues = [&](std::size_t g) {
    const auto place = places_[g].find(request.contents[static_cast<std::size_t>(end) - 1]);
    return place != places_[g].end() && last < request.contents.size() &&
           pool_.read(place->second.block, block_size(g) - 1).next_content ==
               request.contents[last];
  };
  for (std::size_t g = 0; g < num_groups(); ++g)
    if (drops || (keeps_tokens(spec_of(g)) && end % block_size(g) == 0 && !continues(g)))
      return std::max(0, end - setup_.hit_alignment);
  return end;
}

// Moves the end back to the last one that windows and states allow.
void HitLedger::lose_ends(const AuditRequest& request, Count& count) const {
  const std::int32_t alignment = setup_.hit_alignment;
  // The block that is dropped must be in the pool too.
  const std::int32_t dropped = setup_.drops_last_block ? alignment : 0;
  const auto all = static_cast<std::int32_t>(count.totals.there);
  while (count.end > count.hit) {
    if (!can_end(request, count.end, false) ||
        !can_end(request, std::min(count.end + dropped, all), false))
      count.lose(HitLoss::window, count.end - alignment);
    else if (!can_end(request, count.end, true))
      count.lose(HitLoss::state, count.end - alignment);
    else
      break;
  }
}

void HitLedger::step(const AuditRequest& request, std::int32_t hit) {
  if (std::cmp_greater(hit, request.contents.size())) return;
  Count count{.hit = hit};
  count.totals.lookups = 1;
  count.totals.tokens = std::ssize(request.contents);
  count.totals.hit = hit;
  std::int32_t most = -1;
  std::int32_t least = -1;
  for (std::size_t g = 0; g < num_groups(); ++g) {
    if (!keeps_all_tokens(spec_of(g))) continue;
    std::array<std::int64_t, kHitLosses> gone{};
    const std::int32_t reach = reach_of(request, g, gone);
    if (most < 0) count.totals.lost = gone;
    most = std::max(most, reach);
    least = least < 0 ? reach : std::min(least, reach);
  }
  const auto num = static_cast<std::int32_t>(request.contents.size());
  const std::int32_t alignment = setup_.hit_alignment;
  if (most < 0) {  // only windows and states: the last place where a hit could end
    most = num / alignment * alignment;
    while (most > hit && !(can_end(request, most, false) && can_end(request, most, true)))
      most -= alignment;
    least = most;
  }
  count.end = std::max(most, hit);
  count.totals.there = count.end;
  if (!setup_.config.enable_prefix_caching || reads_cache_[request] == 0)
    count.lose(HitLoss::off, 0);
  count.lose(HitLoss::group, least);
  if (count.end >= num) count.lose(HitLoss::last_token, (num - 1) / alignment * alignment);
  count.lose(HitLoss::alignment, count.end / alignment * alignment);
  count.lose(HitLoss::eagle, end_for_draft_model(request, count.end));
  lose_ends(request, count);
  // Sparse retention keeps a hash only of some states and windows.
  const bool is_sparse = setup_.config.prefix_cache_retention_interval != kDenseRetention;
  const bool is_full = std::ranges::all_of(
      setup_.groups, [](const KVCacheGroupSpec& group) { return keeps_all_tokens(group.spec); });
  const bool is_retention = is_sparse && !is_full;
  if (!is_retention) report_first(request, count);
  count.lose(is_retention ? HitLoss::retention : HitLoss::unexplained, 0);
  LS_CHECK(count.end == hit, "{} tokens are neither lost nor hit, of {}", count.end - hit, hit);
  totals_ += count.totals;
}

void HitLedger::begin(const RecordedEvent& event, std::int64_t first_step) {
  if (event.kind != RecordedEvent::Kind::reset_prefix_cache || !event.reset_succeeded) return;
  ++epoch_;
  reset_in_ = step_number();
  first_step_ = first_step;
}

void HitLedger::check_allowed(const AuditRow& row) const {
  const AuditRequest& request = *row.request;
  if (row.num_local_hit == 0 || !setup_.checks_rules()) return;
  const bool is_on = setup_.config.enable_prefix_caching;
  if (!is_on || reads_cache_[request] == 0)
    return report(AuditRule::forbidden_hit, request.name,
                  fmt::format("{} tokens are hit, and {}", row.num_local_hit,
                              is_on ? "the request has skip_reading_prefix_cache"
                                    : "prefix caching is off: enable_prefix_caching"));
  for (std::size_t g = 0; g < num_groups(); ++g) {
    const auto num_hit = static_cast<std::size_t>(ceil_div32(row.num_local_hit, block_size(g)));
    for (std::size_t i = 0; i < std::min(num_hit, request.tables[g].size()); ++i) {
      const BlockId block = request.tables[g][i];
      if (block == kNullBlock || !pool_.belongs_to(block, static_cast<std::int32_t>(g)) ||
          pool_.holders(block)[0].since >= first_step_)
        continue;
      return report(AuditRule::forbidden_hit, request, g,
                    static_cast<std::int64_t>(i) * block_size(g), block,
                    fmt::format("{} tokens are hit, and block {} is from before the reset of the "
                                "prefix cache in step {}",
                                row.num_local_hit, index_of(block), reset_in_));
    }
  }
}

void HitLedger::report_first(const AuditRequest& request, const Count& count) {
  if (count.end <= count.hit || !first_loss_.request.empty()) return;
  first_loss_ = {.rule = AuditRule::hits,
                 .step = step_number(),
                 .request = request.name,
                 .token = count.hit,
                 .last_step = step_number(),
                 .what = fmt::format("{} of {} tokens are hit, and {} more are in the pool",
                                     count.hit, request.contents.size(), count.end - count.hit)};
}

// A recording does not show all reasons to lose single blocks.
void HitLedger::end() {
  constexpr std::int64_t kShare = 20;
  const std::int64_t lost = totals_.lost[static_cast<std::size_t>(HitLoss::unexplained)];
  const bool applies = setup_.scope == AuditScope::whole_recording && setup_.profile != nullptr;
  if (!applies || lost * kShare <= totals_.there) return;
  first_loss_.what +=
      fmt::format(" without a reason against a hit; so are {} of the {} tokens that could be hit",
                  lost, totals_.there);
  findings_.add(std::move(first_loss_), "hits");
}

}  // namespace lockstep
