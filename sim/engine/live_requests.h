// The requests that are live in an engine, and the outputs of steps that the engine has not
// processed yet.
//
// Invariants
// (1) A request is live from its arrival until a decision reports it finished. Its id is not reused
//     until then, although the request may have finished much earlier.
// (2) Names are those of requests that have not finished: no two are the same. A finished request
//     that is still live may share its name with a new one.
// (3) Outputs in flight are in the order of their steps. A report that belongs to no step has step
//     -1.
#pragma once

#include <algorithm>
#include <cstdint>
#include <list>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/ids.h"
#include "base/result.h"
#include "reference/types/kv_connector.h"
#include "reference/types/scheduler_types.h"
#include "sim/engine/step_observer.h"
#include "sim/engine/workload.h"
#include "sim/verdict/run_summary.h"

namespace lockstep {

// A request as the loop counts it.
struct LiveRequest {
  std::string name;
  std::uint64_t ticket = 0;  // the workload's own id, returned in SampledRow
  std::int64_t num_prompt_tokens = 0;
  std::int64_t num_output_tokens = 0;  // sampled, processed by the engine or not
  std::int32_t num_computed = 0;       // as the worker counts: without rejected drafts
  std::int32_t counted_to = 0;         // end of its last row as the engine counts
  bool live = false;
  std::int64_t unsampled_in = -1;  // last step that sampled for it without a recorded token
};

class LiveRequests {
 public:
  // Adds a request. False: another of that name has not finished. REQUIRES: the id is not live.
  bool add(RequestId id, LiveRequest request) {
    if (index_of(id) >= requests_.size()) requests_.resize(index_of(id) + 1);
    LS_CHECK(!at(id).live, "id {} of {} is {}'s", index_of(id), request.name, at(id).name);
    if (!ids_.emplace(request.name, id).second) return false;
    at(id) = std::move(request);
    return true;
  }

  LiveRequest& at(RequestId id) { return requests_[id]; }
  const LiveRequest& at(RequestId id) const { return requests_[id]; }
  // Returns the id of the request of that name that has not finished; null: there is none.
  const RequestId* find(const std::string& name) const {
    const auto id = ids_.find(name);
    return id == ids_.end() ? nullptr : &id->second;
  }
  // Returns all live requests of that name, also finished ones. Linear in the ids.
  std::vector<RequestId> all_called(std::string_view name) const {
    std::vector<RequestId> ids;
    for (std::uint32_t i = 0; i < requests_.size(); ++i)
      if (at(RequestId{i}).live && at(RequestId{i}).name == name) ids.push_back(RequestId{i});
    return ids;
  }
  std::int64_t num_live() const { return std::ranges::count(requests_, true, &LiveRequest::live); }

  // Ends the request for its client: its name becomes free, its id stays live.
  void leave(RequestId id) {
    ids_.erase(at(id).name);
    left_.push_back({at(id).name, at(id).ticket});
  }
  // Returns names and tickets of the requests that finished since the last call, in order: their
  // ids may have been given to others.
  std::vector<std::pair<std::string, std::uint64_t>> take_left() {
    return std::exchange(left_, {});
  }
  // Ends the life of requests that a decision reported finished: their ids may be reused.
  void forget(std::span<const RequestId> finished) {
    for (const RequestId id : finished) {
      LS_CHECK(at(id).live, "id {} finishes and is not live", index_of(id));
      at(id) = {};
    }
  }

 private:
  IdVector<RequestId, LiveRequest> requests_;
  std::unordered_map<std::string, RequestId> ids_;
  std::vector<std::pair<std::string, std::uint64_t>> left_;
};

// Outputs of steps that the engine has not processed yet, oldest first: with asynchronous
// scheduling one stays in flight while the next step is decided.
//
// Invariants
// (1) An empty step is in flight only if a KV connector's workers report with it, and with
//     asynchronous scheduling whenever the engine has a connector: the reports arrive no earlier
//     than the previous step's output.
struct StepInFlight {
  std::int64_t step = 0;  // -1: a report without a step
  ModelOutput output;
  std::vector<RequestId> rows{};  // with a KV connector: the requests of the output's rows

  bool is_empty() const { return output.token_ends.empty() && output.kv_connector_output.empty(); }
  // Returns the number of tokens of the output that belong to the request; 0 without a connector,
  // which is the only reader of `rows`.
  std::int64_t num_sampled(RequestId id) const {
    const auto row = std::ranges::find(rows, id);
    if (row == rows.end()) return 0;
    const auto i = static_cast<std::size_t>(row - rows.begin());
    return output.token_ends[i] - (i == 0 ? 0 : output.token_ends[i - 1]);
  }
};

class OutputsInFlight {
 public:
  // Adds the output of the step that runs now, still empty. Reuses the memory of processed outputs.
  StepInFlight& begin(std::int64_t step) {
    if (processed_.empty()) processed_.emplace_back();
    steps_.splice(steps_.end(), processed_, processed_.begin());
    StepInFlight& flight = steps_.back();
    flight.step = step;
    flight.rows.clear();
    flight.output.tokens.clear();
    flight.output.token_ends.clear();
    flight.output.draft_tokens.clear();
    flight.output.draft_ends.clear();
    flight.output.kv_connector_output.clear();
    return flight;
  }
  // Attaches a report to the last output, or to a new one without a step if none is in flight.
  void attach(KVConnectorOutput report) {
    if (steps_.empty()) begin(-1);
    steps_.back().output.kv_connector_output = std::move(report);
  }

  std::size_t size() const { return steps_.size(); }
  bool empty() const { return steps_.empty(); }
  const StepInFlight& oldest() const { return steps_.front(); }
  const ModelOutput& newest() const { return steps_.back().output; }
  // Removes the oldest output, which stays valid until the next begin() or attach(). REQUIRES: not
  // empty().
  const StepInFlight& take_oldest() {
    processed_.splice(processed_.begin(), steps_, steps_.begin());
    return processed_.front();
  }

  // Returns the step in flight whose report ends a transfer of the request; absent: there is none.
  // `transfers`: finished_recving or finished_sending.
  std::optional<std::int64_t> step_that_ends(std::vector<RequestId> KVConnectorOutput::*transfers,
                                             RequestId id) const {
    for (const StepInFlight& flight : steps_) {
      const std::vector<RequestId>& ended = flight.output.kv_connector_output.*transfers;
      if (std::ranges::find(ended, id) != ended.end()) return flight.step;
    }
    return std::nullopt;
  }
  // True if no output in flight has a token or a report: the engine would learn nothing from them.
  bool hold_nothing() const { return std::ranges::all_of(steps_, &StepInFlight::is_empty); }
  // Returns the tokens of the request in all outputs in flight.
  std::int64_t num_sampled(RequestId id) const {
    std::int64_t num_tokens = 0;
    for (const StepInFlight& flight : steps_) num_tokens += flight.num_sampled(id);
    return num_tokens;
  }

 private:
  std::list<StepInFlight> steps_, processed_;
};

// The KV connector of a run, step by step: its workers' reports and its transfers.
//
// Invariants
// (1) A report is attached to the output of the step that was decided before it.

class ConnectorStep {
 public:
  // All arguments outlive this.
  ConnectorStep(const RunConfig& config, const DecisionSource& decisions, Workload& workload);

  bool is_there() const { return workload_.connector() != nullptr; }
  // Reads the workers' report of the step just decided. Errors: a load that no request waits for, a
  // transfer of blocks that no request keeps, blocks beyond the pool, invalid blocks of an engine
  // with several groups (which vLLM cannot follow either), and a transfer that ends twice.
  // `outputs`: a report in flight has not ended it for the scheduler yet.
  Result<void> take_report(const SchedulerOutput& decision, const OutputsInFlight& outputs);
  // Plans what the step loads and stores, and adds it to the summary's counts. A followed
  // recording without memory plans nothing. `has_memory`: true refuses losses that are not modelled
  // on a backend. REQUIRES: take_report() of the same step.
  Result<void> plan(const SchedulerOutput& decision, bool has_memory, RunSummary& summary);
  const StepTransfers& transfers() const { return transfers_; }
  // The report that arrives with the step's output; the loop moves it into the output in flight.
  KVConnectorOutput& report() { return report_; }
  const KVConnectorOutput& report() const { return report_; }

 private:
  const RunConfig& config_;
  const DecisionSource& decisions_;
  Workload& workload_;
  std::vector<std::int64_t> block_tokens_;  // per group: tokens of a table entry
  KVConnectorOutput report_;
  StepTransfers transfers_;
};

}  // namespace lockstep
