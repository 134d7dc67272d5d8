// Were operations on several streams ordered where they had to be? Told what was really issued, in
// the order in which it was issued, this finds the first pair of operations that touch the same
// bytes, one of them writing, with nothing between them: neither their stream nor an event.
//
// 1. It keeps for every operation the set of all that are done before it begins, and compares
//    ranges pair by pair. It knows no graph and shares nothing with step_graph.h but the ranges.
// 2. A pair is named once, by the later operation; the earlier one is the first that conflicts.
// Not checked: that an operation stays within its ranges (the SIMT executor's part).
#pragma once

#include <boost/dynamic_bitset.hpp>
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

  explicit StreamOrder(int num_streams) : streams_(num_streams) {}

  // As they were called on the device.
  void use_stream(int stream) { stream_ = stream; }
  int record_event();
  void wait_event(int event);
  // What this operation is in conflict with and not ordered after. `operation` must live as long as
  // this object.
  std::optional<Unordered> run(const Operation& operation);

  std::int64_t pairs_compared() const { return pairs_compared_; }

 private:
  using Set = boost::dynamic_bitset<>;
  struct Issued {
    const Operation* operation;
    int stream;
    std::vector<MemoryRange> reads, writes;  // sorted
  };

  std::vector<Set> streams_;  // what is done before the next operation of each
  std::vector<Set> events_;
  std::vector<Issued> issued_;
  int stream_ = 0;
  std::int64_t pairs_compared_ = 0;
};

}  // namespace lockstep::cuda
