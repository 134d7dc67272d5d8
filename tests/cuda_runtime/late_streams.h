// The streams of a simulated GPU: queues of work that runs when the host waits for it, in a seeded
// order.
//
// 1. Work of one stream runs in call order. Only marks order two streams.
// 2. A mark covers the work of its stream up to the call. Work that waits for a mark runs after it,
//    and so does later work of its stream.
// 3. Streams have random ranks that change now and then. The highest stream that can continue does,
//    so work of a low one is as late as rules 1 and 2 and the host allow.
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
  // Runs one piece of work without a waiting host. False: none can run.
  bool run_one();

 private:
  struct Entry {
    Work work;
    Mark waits_for;  // null: nothing
  };
  bool can_continue(const std::deque<Entry>& queue) const {
    return !queue.empty() && (queue.front().waits_for == nullptr || *queue.front().waits_for);
  }

  simt::Random random_;
  std::vector<std::deque<Entry>> queues_;
  std::vector<std::size_t> ranks_;
};

}  // namespace lockstep::cuda
