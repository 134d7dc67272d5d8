// The decisions of another engine, asked for step by step (docs/protocols.md).
//
// (1) What it decides is handed on as it is: whether it makes sense is for the audit to say. Only
//     what names no request or no block at all ends the run, as a failure of the engine.
// (2) Where the engine cannot be asked for something (EngineHello::features), the case is refused.
//
// Not here: block keys, reference counts and all else that only the model can tell of itself.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/ids.h"
#include "base/result.h"
#include "reference/schedule/decision_source.h"
#include "reference/types/kv_cache_spec.h"
#include "sim/foreign/foreign_engine.h"
#include "traces/formats/recording.h"

namespace lockstep {

// What an engine has to be able to do for a configuration and its groups, and cannot; empty: it can
// do it all.
std::string missing_feature(const EngineHello& hello, const RecordingHeader& header);

class ForeignScheduler final : public DecisionSource {
 public:
  // `tables_every`: steps from one showing of all block tables to the next. Errors: what the engine
  // lacks or refuses, an engine that does not start.
  static Result<std::unique_ptr<ForeignScheduler>> open(ForeignEngines& engines,
                                                        const EngineToDecide& engine,
                                                        std::int64_t tables_every);

  Result<RequestId> add_request(RequestSpec request) override;
  void abort_request(RequestId request) override;
  bool reset_prefix_cache(bool preempts_running) override;
  void set_pause_state(PauseState state) override;
  const SchedulerOutput& schedule() override;
  std::span<const StoppedRequest> update_from_output(const ModelOutput& output) override;

  bool has_unfinished_requests() const override { return !live_.empty(); }
  std::span<const RequestId> running() const override { return running_; }
  std::vector<RequestId> waiting() const override { return waiting_; }
  std::int64_t num_tokens(RequestId request) const override { return at(request).num_tokens; }
  std::int64_t num_free_blocks() const override { return step_.free_blocks; }
  std::vector<SkippedRequest> skipped() const override { return skipped_; }
  std::vector<HeldRequest> held() const override;
  CacheCounters take_cache_counters() override;
  std::string_view name(RequestId request) const override { return at(request).name; }
  bool shows_table(RequestId request) const override { return !at(request).table.empty(); }
  std::span<const BlockId> block_table(RequestId request, std::int32_t group) const override;
  std::int64_t scheduler_block_size() const override { return header_.scheduler_block_size; }
  std::int64_t hash_block_size() const override { return header_.hash_block_size; }
  const EngineFailure* failure() const override { return engine_->failure(); }

 private:
  struct Request {
    std::string name;
    std::int64_t num_tokens = 0;
    BlocksPerGroup table = {};  // as shown with the last decision; empty: not shown
    bool is_live = false;       // has not left
    bool is_reported = false;   // ... and its end has been reported
    bool is_sending = false;    // a connector keeps its blocks
    bool is_loading = false;    // ... or loads into them
    bool has_received = false;  // the load has completed, and it has not run since
    bool is_held() const { return !is_live && (is_sending || is_loading); }
  };
  struct InFlight {
    std::int64_t step = 0;
    std::vector<std::string> rows;  // names: an id may be another's by then
  };

  ForeignScheduler(ForeignEngines::Lease engine, RecordingHeader header, KVConnector* connector,
                   std::int64_t tables_every)
      : engine_(std::move(engine)),
        header_(std::move(header)),
        connector_(connector),
        tables_every_(tables_every) {}

  Request& at(RequestId id) { return requests_[id]; }
  const Request& at(RequestId id) const { return requests_[id]; }
  bool ask(const std::string& message, const std::function<void(JsonObject& reply)>& read);
  std::string answer_connector(JsonObject& line);
  RequestId give_id();
  // Null: no request of that name is known. One that has left, where none is live.
  const RequestId* find(const std::string& name) const;
  // A failure of the engine where one is not known.
  std::vector<RequestId> ids_of(std::string_view key, const std::vector<std::string>& names);
  void leave(RequestId id);
  void free_if_over(RequestId id);
  void take_state();
  void take_decision();
  void take_finished();

  ForeignEngines::Lease engine_;
  RecordingHeader header_;
  KVConnector* const connector_;
  const std::int64_t tables_every_;
  IdVector<RequestId, Request> requests_;
  std::unordered_map<std::string, RequestId> live_;
  std::map<std::string, std::deque<RequestId>> left_;  // whose end is not yet reported
  std::map<std::string, RequestId> held_;  // whose end is reported, and whose blocks are kept
  std::vector<RequestId> free_ids_;
  std::vector<RequestId> running_, waiting_;
  std::vector<SkippedRequest> skipped_;
  std::deque<InFlight> in_flight_;
  std::vector<StoppedRequest> stopped_;
  RecordedStep step_;  // what the last reply said
  SchedulerOutput output_;
  CacheCounters counters_;
  std::int64_t num_steps_ = 0;
};

// Each engine of a session by one of these.
DecisionsFactory decisions_of(std::shared_ptr<ForeignEngines> engines,
                              std::int64_t tables_every = 1);

}  // namespace lockstep
