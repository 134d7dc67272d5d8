// A KV connector together with its workers: it answers the scheduler's queries and reports, once
// per step, which transfers have completed.
//
// Invariants
// (1) report() is called once per step, after its decision and before the transfers of that step
//     are planned.
// (2) UnheardLoads holds exactly the loads reported in the last one or two reports: one, or two
//     with asynchronous scheduling.
//
// Not here: which bytes move (TransferPlanner in sim/engine/workload.h).
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
  // Reports what has completed when the step ends. Called once per step, after its decision. A
  // second call in one step would advance the connector's clock.
  virtual KVConnectorOutput report() = 0;
  // True if a transfer or an answer is pending, so the state may change although no request runs.
  // While it is true, an idle step is not a deadlock.
  virtual bool is_busy() const = 0;
};

// Requests whose load has completed before the engine is notified. Until then the load keeps their
// blocks; a connector that also held them would free them twice.
//
// The engine receives a report with the step's output: before the next report, or after it with
// asynchronous scheduling. Example with asynchronous scheduling: the report of step 5 arrives while
// step 6 is in flight, so a request that finishes before that counts as loading for the reports of
// steps 5 and 6.

class UnheardLoads {
 public:
  explicit UnheardLoads(bool async_scheduling) : num_reports_(async_scheduling ? 2 : 1) {}

  // Adds the loads of a new report and drops the oldest one. Called once per step, also without
  // loads.
  void report(std::vector<RequestId> requests) {
    reports_.push_back(std::move(requests));
    if (reports_.size() > num_reports_) reports_.pop_front();
  }
  // True if the request is in one of the remembered reports. Linear in their size, a few requests.
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
