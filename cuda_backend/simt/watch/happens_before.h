// The order between accesses of one launch, as far as the program guarantees it.
//
// An access happened before the viewer's when it is of another launch (a stream is in order), of
// the same thread, of the same CTA before the last barrier, of the same warp before the viewer's
// last __syncwarp, or released to it through an atomic (ReleaseClock).
//  1. Barriers are exact.
//  2. __syncwarp with a partial mask counts for the whole warp: it may hide a race, never invent
//     one.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "cuda_backend/simt/cta_scheduler.h"
#include "cuda_backend/simt/stamp.h"

namespace simt {

// Order through atomics: fence, atomic here; atomic on the same address there ("last CTA done").
//
//  1. A thread that has fenced releases, at its next atomic, what it did before the fence, and
//     what its CTA did before the last barrier in front of that fence.
//  2. An atomic acquires every release made up to the last one on its address. One clock stands
//     for all of them. It follows chains over several addresses, and may hide a race next to such a
//     chain, but never invents one.
// Kernels without __threadfence pay nothing.
struct Worker;
class CtaScheduler;

class ReleaseClock {
 public:
  void begin_launch();
  void on_fence(Worker& me, std::uint32_t base_epoch);
  void on_atomic(Worker& me, const CtaScheduler& scheduler, std::uintptr_t address);

  // Was the access released, and has the thread acquired that?
  bool covers(Stamp other, const Worker& me) const {
    return !by_tag_.empty() && covers_slow(other, me);
  }

 private:
  struct Release {
    Stamp fence;               // of the releasing thread at its fence
    std::uint32_t base_epoch;  // of its CTA at the fence
    std::uint64_t clock;
  };
  bool covers_slow(Stamp other, const Worker& me) const;

  std::unordered_map<std::uint32_t, std::vector<Release>> by_tag_;  // looked up, never iterated
  std::unordered_map<std::uintptr_t, std::uint64_t> last_release_;  // clock, by address
  std::uint64_t clock_ = 0;
};

struct Viewer {
  Stamp stamp;  // no flags
  std::uint32_t base_epoch;
  const Worker* worker;
  const CtaScheduler* scheduler;
  const ReleaseClock* releases;

  bool same_cta(Stamp other) const {
    return tag_of(other) == tag_of(stamp) || scheduler->tag_is_of_this_cta(tag_of(other));
  }
  bool passed_barrier_since(Stamp other) const {
    return same_cta(other) && (tag_of(other) != tag_of(stamp) || epoch_of(other) < base_epoch);
  }
  bool passed_warp_barrier_since(Stamp other) const {
    return same_warp(other, stamp) && epoch_of(other) < epoch_of(stamp);
  }

  // The write, or the read of a thread that read alone.
  bool follows(Stamp other) const {
    return !same_launch(other, stamp) || same_thread(other, stamp) || passed_barrier_since(other) ||
           passed_warp_barrier_since(other) || releases->covers(other, *worker);
  }
  // All the reads that a read stamp stands for.
  bool follows_readers(Stamp readers) const {
    if (!same_launch(readers, stamp)) return true;
    switch (readers & kFlagMask) {
      case kReaderAlone:
        return follows(readers);
      case kReadersInWarp:
        return passed_barrier_since(readers) || passed_warp_barrier_since(readers);
      case kReadersInCta:
        return passed_barrier_since(readers);
      default:
        return false;
    }
  }
  // The read stamp after the viewer has read, too.
  Stamp join_readers(Stamp readers) const {
    if (readers == 0 || !same_launch(readers, stamp)) return stamp;
    const Stamp flag = readers & kFlagMask;
    if (flag == kReadersInGrid || !same_cta(readers)) return stamp | kReadersInGrid;
    if (passed_barrier_since(readers)) return stamp;
    if (flag == kReaderAlone && same_thread(readers, stamp)) return stamp;
    if (flag <= kReadersInWarp && same_warp(readers, stamp))
      return epoch_of(readers) < epoch_of(stamp) ? stamp : stamp | kReadersInWarp;
    return (epoch_of(readers) > epoch_of(stamp) ? without_flags(readers) : stamp) | kReadersInCta;
  }
};

}  // namespace simt
