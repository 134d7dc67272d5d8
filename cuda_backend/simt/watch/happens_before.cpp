#include "cuda_backend/simt/watch/happens_before.h"

#include <algorithm>

#include "cuda_backend/simt/cta_scheduler.h"

namespace simt {

void ReleaseClock::begin_launch() {
  by_tag_.clear();
  last_release_.clear();
  clock_ = 0;
}

void ReleaseClock::on_fence(Worker& me, std::uint32_t base_epoch) {
  me.fence_stamp = me.stamp;
  me.fence_base_epoch = base_epoch;
}

void ReleaseClock::on_atomic(Worker& me, const CtaScheduler& scheduler, std::uintptr_t address) {
  const auto last = last_release_.find(address);
  if (last != last_release_.end()) me.acquired = std::max(me.acquired, last->second);
  if (me.fence_stamp == 0) return;
  last_release_[address] = ++clock_;
  by_tag_[tag_of(me.fence_stamp)].push_back({me.fence_stamp, me.fence_base_epoch, clock_});
  // What the CTA did under earlier tags lies before a barrier (cta_scheduler.h).
  for (const std::uint32_t earlier : scheduler.tags_before(tag_of(me.fence_stamp)))
    by_tag_[earlier].push_back({me.fence_stamp, kMaxEpoch + 1, clock_});
}

bool ReleaseClock::covers_slow(Stamp other, const Worker& me) const {
  const auto releases = by_tag_.find(tag_of(other));
  if (releases == by_tag_.end()) return false;
  return std::any_of(releases->second.begin(), releases->second.end(), [&](const Release& release) {
    return release.clock <= me.acquired &&
           (epoch_of(other) < release.base_epoch ||
            (same_thread(other, release.fence) && epoch_of(other) <= epoch_of(release.fence)));
  });
}

}  // namespace simt
