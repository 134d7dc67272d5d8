// Decisions that arrive step by step in a recording's terms: of an engine in its own process
// (foreign_engine.h), or of a recording (sim/recording/recording_workload.h).
//
// Invariants
// (1) A decision is passed on unchanged; the audit checks it. Only a name that no request has, or
//     an end that no request reached, ends the run as a failure of the reporter.
// (2) A RequestId names one request until its end is reported and no transfer names it.
// (3) Block keys are the model's, over the prompt and the tokens that the engine accepted.
// (4) A name belongs to the live request, else to the one that finished last, else to one whose
//     blocks a transfer keeps: find().
//
// Not here: reference counts and all else that only the model has of itself.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/ids.h"
#include "base/result.h"
#include "reference/cache/block_hash.h"
#include "reference/schedule/decision_source.h"
#include "traces/formats/recording.h"

namespace lockstep {

// The scheduler side of a KV connector, by name. An absent or false result: no request has that
// name.
class ConnectorQueries {
 public:
  virtual ~ConnectorQueries() = default;
  // Returns the tokens that the connector can load after the local hit.
  virtual std::optional<ExternalHit> matched_tokens(const std::string& name,
                                                    std::int32_t num_local_tokens) = 0;
  // True if the connector keeps the blocks of a finished request. `blocks`: those that it still
  // has; absent: as reported last.
  virtual std::optional<bool> request_finished(const std::string& name,
                                               std::optional<BlocksPerGroup> blocks) = 0;
  virtual bool allocated(const std::string& name, std::span<const BlockId> blocks,
                         std::int32_t num_external_tokens) = 0;
};

// The reporter of decisions: an engine's process or a recording. After a failure its further calls
// do nothing.
class StepReporter {
 public:
  virtual ~StepReporter() = default;
  // Errors: the reporter refuses the request.
  virtual Result<void> add(const RequestSpec& request) = 0;
  virtual void abort_request(const std::string& name) = 0;
  virtual void set_pause_state(PauseState state) = 0;
  // Resets the prefix cache. Returns whether it was reset, and in `step` the queues and counts
  // after it. Absent: the reporter has failed.
  virtual std::optional<bool> reset_prefix_cache(bool preempts_running, RecordedStep& step) = 0;
  // Decides step `number` into an empty `step`. False: the reporter has failed.
  virtual bool decide(std::int64_t number, RecordedStep& step) = 0;
  struct TokenCounts {
    std::vector<std::pair<std::string, std::int64_t>> num_tokens;  // by request
    bool are_claims = false;  // true: an engine's own, to be checked
  };
  // Processes an output. `output`: number, samples, drafts and connector report of an earlier step.
  // `step`: receives the ends, queues and counts after it. False: the reporter has failed.
  virtual bool update(const RecordedStep& output, RecordedStep& step, TokenCounts& counts) = 0;
  virtual const EngineFailure* failure() const = 0;  // null: none
  virtual void fail(std::string what) = 0;           // records that its report makes no sense
  // Lines about what its reports did not contain.
  virtual std::vector<std::string> not_checked() const { return {}; }
};

class ReportedDecisions : public DecisionSource, public ConnectorQueries {
 public:
  // `header`: groups, options and block sizes of the decisions. `connector` may be null; it
  // outlives this.
  ReportedDecisions(std::unique_ptr<StepReporter> reporter, RecordingHeader header,
                    KVConnector* connector);

  Result<RequestId> add_request(RequestSpec request) override;
  void abort_request(RequestId request) override;
  bool reset_prefix_cache(bool preempts_running) override;
  void set_pause_state(PauseState state) override { reporter_->set_pause_state(state); }
  const SchedulerOutput& schedule() override;
  std::span<const StoppedRequest> update_from_output(const ModelOutput& output) override;

  bool has_unfinished_requests() const override { return !live_.empty(); }
  std::span<const RequestId> running() const override { return running_; }
  std::span<const RequestId> waiting() const override { return waiting_; }
  std::int64_t num_tokens(RequestId request) const override { return at(request).num_tokens; }
  std::int64_t num_free_blocks() const override { return step_.free_blocks; }
  std::vector<SkippedRequest> skipped() const override { return skipped_; }
  std::vector<HeldRequest> held() const override;
  CacheCounters take_cache_counters() override { return std::exchange(counters_, {}); }
  std::string_view name(RequestId request) const override { return at(request).name; }
  bool shows_table(RequestId request) const override { return at(request).is_shown; }
  std::span<const BlockId> block_table(RequestId request, std::int32_t group) const override;
  std::int64_t scheduler_block_size() const override { return header_.scheduler_block_size; }
  std::int64_t hash_block_size() const override { return header_.hash_block_size; }
  std::span<const BlockKey> block_keys(RequestId request) const override;
  std::span<const StaleOutput> stale_outputs() const override { return stale_outputs_; }
  const EngineFailure* failure() const override { return reporter_->failure(); }
  std::vector<std::string> not_checked() const override { return reporter_->not_checked(); }
  std::string_view name_without_profile() const override {
    return header_.engine.name == "vllm" ? std::string_view() : header_.engine.name;
  }

  std::optional<ExternalHit> matched_tokens(const std::string& name,
                                            std::int32_t num_local_tokens) override;
  std::optional<bool> request_finished(const std::string& name,
                                       std::optional<BlocksPerGroup> blocks) override;
  bool allocated(const std::string& name, std::span<const BlockId> blocks,
                 std::int32_t num_external_tokens) override;

 private:
  // The tokens of a request and their keys: a connector's tier finds blocks by them.
  struct KnownTokens {
    TokenSequence tokens;
    std::string cache_salt;
    RequestKeys keys;
    BlockHashChain hashes{};
  };
  // A request as the reports describe it.
  struct Request {
    std::string name;
    std::int64_t first_step = 0;     // that could schedule it
    std::int64_t preempted_in = -1;  // last step that preempted it, or the one after a reset
    std::int64_t num_tokens = 0;
    std::vector<std::int32_t> item_rows{};  // rows of the encoder, per item of the prompt
    BlocksPerGroup table = {};              // as last reported, with the blocks added since
    bool is_shown = false;                  // true if the last decision reported its table
    bool is_live = false;                   // true until it finishes or is aborted
    bool is_reported = false;               // true if a decision has reported its end
    bool is_sending = false;                // true if a connector keeps its blocks
    bool is_loading = false;                // true if a connector loads into its blocks
    bool has_received = false;  // true if its load has completed and it has not run since
    std::optional<KnownTokens> known = std::nullopt;  // absent without a connector
    bool is_held() const { return !is_live && (is_sending || is_loading); }
  };
  struct InFlight {
    std::int64_t step = 0;
    std::vector<std::string> rows;  // names: an id may belong to another request by then
  };

  Request& at(RequestId id) { return requests_[id]; }
  const Request& at(RequestId id) const { return requests_[id]; }
  // Returns an unused id; ids that were freed first are reused first.
  RequestId give_id();
  // Returns the request of that name: invariant (4). Null: none.
  const RequestId* find(const std::string& name) const;
  // Returns the ids of the names. An unknown name is a failure of the reporter and is left out.
  std::vector<RequestId> ids_of(std::string_view key, const std::vector<std::string>& names);
  void leave(RequestId id);
  void free_if_over(RequestId id);
  // Each reads one part of step_, the last report, into the members that the loop queries.
  void take_state();
  void take_decision();
  bool take_row(const RecordedScheduled& row);
  void take_pages();
  void take_tables();
  void check_loads();
  void take_transfers();
  void take_finished();
  void take_report(const KVConnectorOutput& report, RecordedStep& output);
  // Compares an engine's counts with the tokens that its requests had and the samples of `output`.
  void check_counts(const StepReporter::TokenCounts& counts, const RecordedStep& output);
  // Sets the number of the request's tokens, of which the last are the first of `sampled`.
  void take_tokens(RequestId id, std::int64_t num_tokens,
                   const std::vector<RecordedTokens>& sampled);
  void extend_keys(KnownTokens& known) const;

  std::unique_ptr<StepReporter> reporter_;
  RecordingHeader header_;
  KVConnector* const connector_;
  IdVector<RequestId, Request> requests_;
  std::unordered_map<std::string, RequestId> live_;
  std::map<std::string, std::deque<RequestId>> left_;  // end not yet reported; oldest first
  std::map<std::string, RequestId> held_;              // end reported, blocks kept by a transfer
  std::vector<RequestId> free_ids_;
  std::vector<RequestId> running_, waiting_;
  std::vector<SkippedRequest> skipped_;
  std::deque<InFlight> in_flight_;
  std::vector<StoppedRequest> stopped_;
  std::vector<StaleOutput> stale_outputs_;
  RecordedStep step_;  // the last report
  SchedulerOutput output_;
  CacheCounters counters_;
  std::int64_t num_steps_ = 0;
  std::int64_t reset_before_ = 0;  // output of earlier steps may be dropped: a reset preempted all
};

}  // namespace lockstep
