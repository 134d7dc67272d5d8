// Whose load is over, until the engine has heard of it: their blocks are kept for the load as long,
// and a connector that wants to keep them as well would have them given back twice.
//
// A report is heard of with the step's output: before the next one is made, or, with asynchronous
// scheduling, after it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <deque>
#include <utility>
#include <vector>

#include "base/ids.h"

namespace lockstep {

class UnheardLoads {
 public:
  explicit UnheardLoads(bool async_scheduling) : num_reports_(async_scheduling ? 2 : 1) {}

  // A report is made. Once a step.
  void report(std::vector<RequestId> requests) {
    reports_.push_back(std::move(requests));
    if (reports_.size() > num_reports_) reports_.pop_front();
  }
  bool contains(RequestId request) const {
    return std::ranges::any_of(reports_, [&](const std::vector<RequestId>& report) {
      return std::ranges::find(report, request) != report.end();
    });
  }

 private:
  std::size_t num_reports_;
  std::deque<std::vector<RequestId>> reports_;  // the last ones, oldest first
};

}  // namespace lockstep
