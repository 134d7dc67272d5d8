#include "reference/schedule/request_queue.h"

#include <algorithm>

#include "base/check.h"

namespace lockstep {

void RequestQueue::add(RequestId id, const Request& request) {
  if (policy_ == SchedulingPolicy::fcfs)
    fifo_.push_back(id);
  else
    ordered_.insert({&request, id});
}

void RequestQueue::prepend(RequestId id, const Request& request) {
  if (policy_ == SchedulingPolicy::fcfs)
    fifo_.push_front(id);
  else
    ordered_.insert({&request, id});
}

RequestId RequestQueue::peek() const {
  LS_CHECK(!empty(), "peek at an empty queue");
  return policy_ == SchedulingPolicy::fcfs ? fifo_.front() : ordered_.begin()->id;
}

void RequestQueue::pop() {
  LS_CHECK(!empty(), "pop from an empty queue");
  if (policy_ == SchedulingPolicy::fcfs)
    fifo_.pop_front();
  else
    ordered_.erase(ordered_.begin());
}

void RequestQueue::remove(RequestId id, const Request& request) {
  if (policy_ == SchedulingPolicy::fcfs)
    std::erase(fifo_, id);
  else
    ordered_.erase({&request, id});
}

std::vector<RequestId> RequestQueue::in_order() const {
  if (policy_ == SchedulingPolicy::fcfs) return {fifo_.begin(), fifo_.end()};
  std::vector<RequestId> out;
  out.reserve(ordered_.size());
  for (const Place& place : ordered_) out.push_back(place.id);
  return out;
}

}  // namespace lockstep
