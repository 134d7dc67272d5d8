// A KV connector with its workers: the scheduler's queries, and the reports of each step.
//
// Invariants
// (1) report() is called once per step, after its decision.
// (2) UnheardLoads holds exactly the loads reported in the last one or two reports: one, or two
//     with asynchronous scheduling.
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
  // Called once per step, after its decision: what will have completed when it ends.
  virtual KVConnectorOutput report() = 0;
  // Something may still change without anything running: a transfer, or an answer that is due.
  virtual bool is_busy() const = 0;
};

// Requests whose load has completed before the engine is notified. Until then the load keeps their
// blocks; a connector that also held them would free them twice.
//
// The engine receives a report with the step's output: before the next report, or after it with
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
