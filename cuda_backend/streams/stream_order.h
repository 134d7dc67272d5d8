// Checks that operations on several streams were ordered where they had to be. From the calls that
// were really issued, in order, it finds pairs of operations that touch the same bytes, at least
// one of them writing, without an order between them by stream or event.
//
// Invariants:
// 1. Every call is a vertex. A stream joins it to the stream's previous call, an event to its
//    record. Calls that the transitive closure does not order may run in any order.
// 2. Edges point from earlier calls to later ones.
// 3. A pair is reported once, at the later operation; the earlier one is its first conflict.
// 4. The class is independent of how operations came to their streams. It shares only the ranges
//    with step_graph.h.
// Not checked: that an operation stays within its ranges. The SIMT executor checks it.
#pragma once

#include <boost/graph/adjacency_list.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "cuda_backend/device/device.h"

namespace lockstep::cuda {

class StreamOrder {
 public:
  struct Unordered {
    std::string earlier, later;  // names, in the order in which they were issued
    int earlier_stream = 0, later_stream = 0;
    MemoryRange range;  // that both touch
    bool earlier_writes = false, later_writes = false;
  };

  explicit StreamOrder(int num_streams) : last_of_stream_(num_streams, -1) {}

  // The calls as the device received them.
  void use_stream(int stream) {
    LS_CHECK(stream >= 0 && std::cmp_less(stream, last_of_stream_.size()), "stream {} of {}",
             stream, last_of_stream_.size());
    stream_ = stream;
  }
  int record_event();
  void wait_event(int event);
  // REQUIRES: `operation` outlives this object.
  void run(const Operation& operation);

  // Conflicting pairs without an order, in the order of the later operations.
  std::vector<Unordered> unordered_pairs() const;

 private:
  using Calls = boost::adjacency_list<boost::vecS, boost::vecS, boost::directedS>;
  struct Issued {
    const Operation* operation;
    int stream;
    int call;
    std::vector<MemoryRange> reads, writes;  // sorted
  };
  int add_call();
  // The first bytes over which two operations conflict; nothing: they do not.
  static std::optional<Unordered> conflict(const Issued& before, const Issued& now);

  Calls calls_;
  std::vector<int> last_of_stream_;  // call; -1: none
  std::vector<int> events_;          // the calls that record them
  std::vector<Issued> issued_;
  int stream_ = 0;
};

}  // namespace lockstep::cuda
