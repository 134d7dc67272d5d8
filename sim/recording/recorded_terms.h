// A step of a run in the terms of a recording: conform compares it with a recorded step, and a run
// recorder writes it.
//
// Invariants
// (1) Lists have the order and the omissions of docs/formats.md, "Engine recording".
// (2) ConnectorLog forwards every call unchanged.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "reference/types/kv_connector.h"
#include "sim/engine/step_observer.h"
#include "traces/formats/recording.h"

namespace lockstep {

// In the order of the ids.
void write_names(const StepView& view, std::span<const RequestId> ids,
                 std::vector<std::string>& names);

// What was decided: everything but the events, the common prefix, tables and the connector.
void write_decision(const StepView& view, RecordedStep& step);
// The whole block table of one request. REQUIRES: it is live, or has finished and keeps its blocks.
RecordedTable table_of(const StepView& view, RequestId id);
// Tables of every running request.
std::vector<RecordedTable> tables_of(const StepView& view);
// With a KV connector: the queue of skipped requests, and the tables of loading requests that are
// not `received`: with a step in flight the scheduler is notified of a load's end one step late.
void write_transfers(const StepView& view, const std::set<std::string>& received,
                     RecordedStep& step);
// What the step's reset_prefix_cache events returned, in order.
void write_reset_results(const StepView& view, std::vector<RecordedEvent>& events);
// Live requests, sorted. They are sorted again only in a step that changes a queue.
class UnfinishedNames {
 public:
  void step(const StepView& view);
  const std::vector<std::string>& sorted() const { return sorted_; }

 private:
  std::vector<std::string_view> now_;         // in the order of the queues, during step()
  std::vector<std::string> queued_, sorted_;  // in that order; by name, each once
};
// Requests ended by the step's output, and the result of prefix cache resets.
void write_outcome(const StepView& view, RecordedStep& step);
// Drafts of live requests that the step does not schedule. REQUIRES: the model decides.
void write_held_drafts(const StepView& view, RecordedStep& step);
// Outputs that arrived for requests preempted meanwhile.
void write_stale_outputs(const StepView& view, RecordedStep& step);
// The step's events of the prefix cache.
void write_cache_events(const StepView& view, RecordedStep& step);

// A KV connector that wraps another and records queries and answers in a recording's terms: conform
// compares them and a run recorder writes them.
//
// Not checked here: whether an answer makes sense.

class ConnectorLog final : public KVConnector {
 public:
  // `inner` must outlive the log.
  explicit ConnectorLog(KVConnector& inner) : inner_(inner) {}

  KVConnectorTraits traits() const override { return inner_.traits(); }
  ExternalHit get_num_new_matched_tokens(const ExternalQuery& query) override;
  void update_state_after_alloc(RequestId request, std::span<const BlockId> blocks,
                                std::int32_t num_external_tokens) override {
    inner_.update_state_after_alloc(request, blocks, num_external_tokens);
  }
  void start_pages(const HostPageCommand& command) override { inner_.start_pages(command); }
  bool request_finished(RequestId request, std::string_view name) override;
  void order_failed_requests(std::vector<RequestId>& requests) override {
    inner_.order_failed_requests(requests);
  }
  void order_published_requests(std::vector<std::string>& names) override {
    inner_.order_published_requests(names);
  }

  // Since the last call, in the order asked.
  std::vector<RecordedConnectorAnswer> take_answers() { return std::exchange(answers_, {}); }
  // Requests that finished since the last call and keep their blocks, in order.
  std::vector<std::string> take_held() { return std::exchange(held_, {}); }
  const std::vector<std::string>& held() const { return held_; }
  // A report in a recording's terms. REQUIRES: of requests that went through the log.
  RecordedWorker worker(const KVConnectorOutput& report) const;
  // At the end of a step, with what was reported in it.
  void finished(const StepView& view, const std::optional<RecordedWorker>& worker);
  // Whose load has ended, and the scheduler has not heard of it.
  const std::set<std::string>& received() const { return received_; }

 private:
  KVConnector& inner_;
  std::vector<RecordedConnectorAnswer> answers_;
  std::vector<std::string> held_;
  std::set<std::string> received_;
  std::map<RequestId, std::string> names_;
};

// A step of the model in a recording's terms, and the first place where two recorded steps differ.

// Records the model's decisions: `decided` after schedule(), `finished` at the end of the step.
// Inputs of a recording (events, samples, drafts) are copied from `recorded`.
class StepTranscript {
 public:
  explicit StepTranscript(const RecordingHeader& header)
      : has_cache_events_(header.has_cache_events),
        has_held_drafts_(header.has_held_drafts),
        has_stale_outputs_(header.has_stale_outputs) {}
  // `connector`: what answered the scheduler; null: nothing did. What the step comes to is
  // `recorded`'s until `finished`: what differs before is a decision.
  void decided(const RecordedStep& recorded, const StepView& view, ConnectorLog* connector);
  // What was sampled and reported, where `recorded` did not have it yet when the step was decided.
  void take_inputs(const RecordedStep& recorded);
  void finished(const StepView& view, ConnectorLog* connector);
  const RecordedStep& step() const { return step_; }

 private:
  bool has_cache_events_, has_held_drafts_, has_stale_outputs_;
  RecordedStep step_;
};

struct FieldDifference {
  std::string what;  // "scheduled[2].blocks[0][1]"
  std::string recorded;
  std::string model;
};
// REQUIRES: the lines differ. JSON text of steps or end lines.
FieldDifference first_difference(const std::string& recorded_line, const std::string& model_line);

}  // namespace lockstep
