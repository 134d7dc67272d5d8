// The queue of waiting requests: first come first served, or by priority.
#pragma once

#include <cstdint>
#include <deque>
#include <set>
#include <vector>

#include "reference/cache/request.h"
#include "reference/types/engine_config.h"

namespace lockstep {

class RequestQueue {
 public:
  explicit RequestQueue(SchedulingPolicy policy) : policy_(policy) {}

  bool empty() const {
    return policy_ == SchedulingPolicy::fcfs ? fifo_.empty() : ordered_.empty();
  }
  std::size_t size() const {
    return policy_ == SchedulingPolicy::fcfs ? fifo_.size() : ordered_.size();
  }
  void add(RequestId id, const Request& request);
  // Puts a resumed request at the front. A priority queue orders it by priority instead.
  void prepend(RequestId id, const Request& request);
  RequestId peek() const;  // REQUIRES: not empty
  void pop();
  void remove(RequestId id, const Request& request);
  std::vector<RequestId> in_order() const;

 private:
  struct Place {
    const Request* request;
    RequestId id;
    bool operator<(const Place& other) const {
      if (request->before(*other.request)) return true;
      if (other.request->before(*request)) return false;
      return id < other.id;
    }
  };
  SchedulingPolicy policy_;
  std::deque<RequestId> fifo_;
  std::set<Place> ordered_;
};

}  // namespace lockstep
