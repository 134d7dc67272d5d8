// Were operations on several streams ordered where they had to be? Told what was really issued, in
// the order in which it was issued, this finds pairs of operations that touch the same bytes, one
// of them writing, with nothing between them: neither their stream nor an event.
//
// 1. Every call is a vertex: a stream joins it to the call before, an event to its record. What the
//    transitive closure of that does not order may run in any order.
// 2. It knows nothing of how operations came to their streams and shares nothing with step_graph.h
//    but the ranges.
// 3. A pair is named once, by the later operation; the earlier one is the first that conflicts.
// Not checked: that an operation stays within its ranges (the SIMT executor's part).
#pragma once

#include <boost/graph/adjacency_list.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cuda_backend/device/operation.h"

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

  // As they were called on the device.
  void use_stream(int stream) { stream_ = stream; }
  int record_event();
  void wait_event(int event);
  // `operation` must live as long as this object.
  void run(const Operation& operation);

  // Pairs that conflict and are not ordered, in the order of the later ones.
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
  // The bytes over which two operations meet; nothing when they do not.
  static std::optional<Unordered> conflict(const Issued& before, const Issued& now);

  Calls calls_;
  std::vector<int> last_of_stream_;  // call; -1: none
  std::vector<int> events_;          // the calls that record them
  std::vector<Issued> issued_;
  int stream_ = 0;
};

}  // namespace lockstep::cuda
