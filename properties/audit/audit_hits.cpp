// What prefixes were in the pool when a request came in, how much of it was hit, and why not the
// rest. Nothing is asked of hashes: content is in the pool as long as its block is not handed out
// to somebody else or zeroed, and can be hit unless the cache was reset since.
#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "properties/audit/audit_impl.h"

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

bool Auditor::Impl::still_holds(BlockId block, std::size_t group, std::uint64_t content) const {
  if (block == kNullBlock || !ledger_.belongs_to(block, static_cast<std::int32_t>(group)))
    return false;
  return is_state(groups_[group].spec)
             ? ledger_.state(block).content == content
             : ledger_.read(block, block_size(group) - 1).content == content;
}

// A block is full of tokens that stand, or has a state where a hit may end.
void Auditor::Impl::note_content(std::size_t group, std::uint64_t content, BlockId block) {
  if (!counts_hits_ || content == 0) return;
  auto& places = places_[group];
  ContentPlace& place = places[content];
  if (place.block != block) place.block_before = std::exchange(place.block, block);
  place.epoch = epoch_;
  if (places.size() < num_places_max_[group]) return;
  std::erase_if(places, [&](const auto& of) {
    return !still_holds(of.second.block, group, of.first) &&
           !still_holds(of.second.block_before, group, of.first);
  });
  num_places_max_[group] = std::max(num_places_max_[group], 2 * places.size());
}

// Whether content can be hit, and if not whether it was there once.
Auditor::Impl::Presence Auditor::Impl::presence_of(std::size_t group, std::uint64_t content) const {
  const auto found = places_[group].find(content);
  if (found == places_[group].end()) return Presence::never;
  const bool is_there = still_holds(found->second.block, group, content) ||
                        still_holds(found->second.block_before, group, content);
  if (!is_there) return Presence::evicted;
  return found->second.epoch == epoch_ ? Presence::there : Presence::cleared;
}

// Tokens at the head of the request that a group of full attention has blocks of; behind them, what
// it once had is counted.
std::int32_t Auditor::Impl::reach_of(const AuditedRequest& request, std::size_t group,
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

// Whether a hit may end behind token `end` as far as this group is concerned.
bool Auditor::Impl::can_end(const AuditedRequest& request, std::size_t group,
                            std::int32_t end) const {
  const KVCacheSpec& spec = groups_[group].spec;
  if (end == 0 || keeps_all_tokens(spec) || is_ring(spec) || spec.bounded_replay) return true;
  const auto content_before = [&](std::int32_t position) {
    return request.contents[static_cast<std::size_t>(position) - 1];
  };
  if (is_state(spec)) return presence_of(group, content_before(end)) == Presence::there;
  const std::int32_t size = block_size(group);
  if (end % size != 0) return false;
  for (std::int32_t last = first_read(group, end) / size * size + size; last <= end; last += size)
    if (presence_of(group, content_before(last)) != Presence::there) return false;
  return true;
}

// What a drafter needs of a hit: the block behind it, or where hashes look ahead the same tokens
// behind its end.
std::int32_t Auditor::Impl::end_for_drafter(const AuditedRequest& request, std::int32_t end) const {
  const bool looks_ahead = !drops_last_block_ && hash_lookahead_ > 0;
  if (end == 0 || (!drops_last_block_ && !looks_ahead)) return end;
  const auto behind = static_cast<std::size_t>(end + hash_lookahead_ - 1);
  const auto goes_on = [&](std::size_t g) {
    const auto place = places_[g].find(request.contents[static_cast<std::size_t>(end) - 1]);
    return place != places_[g].end() && behind < request.contents.size() &&
           ledger_.read(place->second.block, block_size(g) - 1).next_content ==
               request.contents[behind];
  };
  for (std::size_t g = 0; g < groups_.size(); ++g)
    if (drops_last_block_ ||
        (keeps_tokens(groups_[g].spec) && end % block_size(g) == 0 && !goes_on(g)))
      return std::max(0, end - hit_alignment_);
  return end;
}

void Auditor::Impl::count_hit(const AuditedRequest& request, std::int32_t hit) {
  if (!counts_hits_ || std::cmp_greater(hit, request.contents.size())) return;
  HitTotals now;
  now.lookups = 1;
  now.tokens = std::ssize(request.contents);
  now.hit = hit;
  std::int32_t most = -1;
  std::int32_t least = -1;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    if (!keeps_all_tokens(groups_[g].spec)) continue;
    std::array<std::int64_t, kHitLosses> gone{};
    const std::int32_t reach = reach_of(request, g, gone);
    if (most < 0) now.lost = gone;
    most = std::max(most, reach);
    least = least < 0 ? reach : std::min(least, reach);
  }
  const auto num = static_cast<std::int32_t>(request.contents.size());
  if (most < 0) {  // windows and states alone: the last place where a hit could end
    most = num / hit_alignment_ * hit_alignment_;
    const auto all_can_end = [&] {
      for (std::size_t g = 0; g < groups_.size(); ++g)
        if (!can_end(request, g, most)) return false;
      return true;
    };
    while (most > hit && !all_can_end()) most -= hit_alignment_;
    least = most;
  }
  std::int32_t end = std::max(most, hit);
  const std::int32_t now_there = end;
  now.there = now_there;
  const auto lose_to = [&](HitLoss cause, std::int32_t next) {
    next = std::max(next, hit);
    if (next >= end) return;
    now.lost[static_cast<std::size_t>(cause)] += end - next;
    end = next;
  };
  if (!config_.enable_prefix_caching || !request.reads_cache) lose_to(HitLoss::off, 0);
  lose_to(HitLoss::group, least);
  if (end >= num) lose_to(HitLoss::last_token, (num - 1) / hit_alignment_ * hit_alignment_);
  lose_to(HitLoss::alignment, end / hit_alignment_ * hit_alignment_);
  lose_to(HitLoss::eagle, end_for_drafter(request, end));
  // The block that is dropped is looked for too.
  const std::int32_t dropped = drops_last_block_ ? hit_alignment_ : 0;
  while (end > hit) {
    const auto cannot = [&](bool states, std::int32_t at) {
      for (std::size_t g = 0; g < groups_.size(); ++g)
        if (is_state(groups_[g].spec) == states && !can_end(request, g, at)) return true;
      return false;
    };
    if (cannot(false, end) || cannot(false, std::min(end + dropped, now_there)))
      lose_to(HitLoss::window, end - hit_alignment_);
    else if (cannot(true, end))
      lose_to(HitLoss::state, end - hit_alignment_);
    else
      break;
  }
  // Sparse retention leaves most states and windows without a hash.
  const bool is_sparse = config_.prefix_cache_retention_interval != kDenseRetention;
  const bool is_full = std::ranges::all_of(
      groups_, [](const KVCacheGroupSpec& group) { return keeps_all_tokens(group.spec); });
  const HitLoss rest = is_sparse && !is_full ? HitLoss::retention : HitLoss::unexplained;
  if (rest == HitLoss::unexplained && end > hit && first_lost_hit_.request.empty())
    first_lost_hit_ = {.rule = AuditRule::hits,
                       .step = step_,
                       .request = request.name,
                       .token = hit,
                       .last_step = step_,
                       .what = fmt::format("{} of {} tokens are hit, and {} more are in the pool",
                                           hit, request.contents.size(), end - hit)};
  lose_to(rest, 0);
  hits_ += now;
}

// Single blocks may be lost to what a recording does not show; whole shares are not.
void Auditor::Impl::check_hits() {
  constexpr std::int64_t kShare = 20;
  const std::int64_t lost = hits_.lost[static_cast<std::size_t>(HitLoss::unexplained)];
  if (scope_ != AuditScope::whole_recording || !knows_hits_ || lost * kShare <= hits_.there) return;
  first_lost_hit_.what += fmt::format(
      " that nothing stands against; so it is with {} of the {} tokens that could be hit", lost,
      hits_.there);
  tell(std::move(first_lost_hit_), "hits");
}

}  // namespace lockstep
