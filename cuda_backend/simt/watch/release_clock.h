// Order through atomics: fence, atomic here; atomic on the same address there ("last CTA done").
//
//  1. A thread that has fenced releases, at its next atomic, what it did before the fence, and
//     what its CTA did before the last barrier in front of that fence.
//  2. An atomic acquires every release made up to the last one on its address. One clock stands
//     for all of them: chains over several addresses are followed, and a race beside such a chain
//     may be hidden; none is invented.
// Costs nothing to kernels without __threadfence.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "cuda_backend/simt/watch/stamp.h"

namespace simt {

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

}  // namespace simt
