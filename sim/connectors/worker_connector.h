// A KV connector with its workers: what the scheduler asks, and what comes back with each step.
#pragma once

#include <algorithm>
#include <cstddef>
#include <deque>
#include <utility>
#include <vector>

#include "base/ids.h"
#include "reference/types/kv_connector.h"

namespace lockstep {

class WorkerConnector : public KVConnector {
 public:
  // Once a step, after it has been decided: what will have ended when it is over.
  virtual KVConnectorOutput report() = 0;
  // Something may still change without anything running: a transfer, or an answer that is due.
  virtual bool is_busy() const = 0;
};

// Requests whose load is over and the engine does not know yet. The load keeps their blocks so
// long, and a connector that wants to keep them as well would have them given back twice.
//
// The engine hears of a report with the step's output: before the next report, or after it with
// asynchronous scheduling.

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
