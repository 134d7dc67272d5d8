// The streams of a simulated GPU: queues of work that is done when somebody waits for it, in an
// order drawn from a seed.
//
// 1. Work of one stream is done in the order in which it came; between two streams there is no
//    order but that of marks.
// 2. A mark stands for what its stream had been given when it was set. Work that is told to wait
//    for it is done after that, and so is what follows it in its stream.
// 3. Streams have ranks that are drawn anew now and then, and the highest that can go on does: work
//    of a low one is as late as the first two rules and the host allow.
// 4. Same seed and same calls: same order.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "cuda_backend/simt/random.h"

namespace lockstep::cuda {

class LateStreams {
 public:
  using Work = std::function<void()>;
  using Mark = std::shared_ptr<const bool>;  // true: passed

  explicit LateStreams(std::uint64_t seed) : random_(seed) {}

  std::size_t add();
  void put(std::size_t stream, Work work);
  Mark mark(std::size_t stream);
  void wait(std::size_t stream, Mark mark);

  // The host waits: for a mark, and for everything.
  void run_to(const Mark& mark);
  void run_all();
  // What a device does while nobody waits. False: nothing can go on.
  bool run_one();

 private:
  struct Entry {
    Work work;
    Mark waits_for;  // null: nothing
  };
  bool can_go_on(const std::deque<Entry>& queue) const {
    return !queue.empty() && (queue.front().waits_for == nullptr || *queue.front().waits_for);
  }

  simt::Random random_;
  std::vector<std::deque<Entry>> queues_;
  std::vector<std::size_t> ranks_;
};

}  // namespace lockstep::cuda
