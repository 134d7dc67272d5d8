// Samples and ends of requests: each request is in a queue until it ends, samples what its rows
// allow, and ends for the reported reason.
//
// Invariants, each with the rule that it breaks:
// (1) A row samples a token only after the last known token, and one more per accepted draft; no
//     token follows the one that ended its request (sampled).
// (2) A reported end has its reason: a limit, a stop token, a repetition that was to be detected
//     (sampled).
// (3) A row computes tokens that are known or drafted (scheduled_tokens). With an output that was
//     not seen, the finding waits until the next output shows that it is missing.
// (4) A live request is in one queue, and no other is in any; its preemption and its end reach the
//     worker and the client, each once (queues). A recording that lists no request in any queue
//     does not list its queues, nor does one of a connector without the requests that it holds.
// (5) Outputs are received in the order of their steps, each once, and only by the request that
//     computed them: none after its end, none that a preemption or a reset dropped, and none of
//     its own is dropped without need (stale_output).
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "properties/audit/block_ledger.h"
#include "properties/audit/draft_ledger.h"

namespace lockstep {

class OutputLedger : Ledger {
 public:
  // When a request ends, and its samples whose output may be in flight.
  struct Ends {
    std::int32_t max_tokens = 0;
    bool has_min_tokens = false;
    bool detects_repetition = false;
    bool is_pooled = false;  // its pooled output was received
    std::optional<std::int32_t> eos_token{};
    std::vector<std::int32_t> stop_token_ids{};
    bool lists_tokens = false;        // that end it, or that it has none
    std::int64_t first_step = 0;      // that may schedule it
    std::int64_t full_since = -1;     // step that sampled the last token it may have
    std::int64_t stopped_since = -1;  // step that sampled a token that ends it
    std::int64_t unheard_step = -1;   // last step that must have sampled and shows no token
    std::int64_t queued_in = -1;      // last step that lists it in a queue
    const char* queue = nullptr;      // the first one of these; null: the running one
    // Steps that sampled for it, and the number of its tokens before.
    std::vector<std::pair<std::int64_t, std::size_t>> sampled_in{};
    std::vector<std::pair<std::int64_t, std::string>> void_outputs{};  // steps, and why
    std::vector<std::pair<std::int64_t, std::int32_t>> rejected_in{};  // steps, and drafts
    bool is_ended_by(std::int32_t token) const;
  };

  OutputLedger(AuditCore& core, BlockLedger& blocks, const RecordingHeader& header);

  void begin(const AuditRequest& request, const RecordedEvent& event, std::int64_t first_step);
  Ends& ends_of(const AuditRequest& request) { return ends_[request]; }
  // A reset sends a running request back: its output in flight is dropped.
  void reset(AuditRequest& request);
  // Drops the outputs of steps after `last`, and the tokens that they sampled.
  void withdraw_after(AuditRequest& request, std::int64_t last, const std::string& why);
  // A name is used again before the worker received the end of its previous request.
  void expect_end(const std::string& name) { expected_ends_.insert(name); }
  // False: the reported end is not that of the live request.
  bool check_end(const std::string& name);

  // Rules about one row.
  // End of its last row as the engine counts when it decides the next one.
  std::int32_t take_count(AuditRequest& request);
  void check_limit(const AuditRequest& request) const;
  void report_unknown_tokens(const AuditRow& row);
  void check_sampled(const AuditRow& row) const;
  // The row's samples become the request's.
  void accept(const RecordedStep& step, const AuditRow& row);
  // Rules about all requests of a step.
  void check_queues(const RecordedStep& step);
  void check_unscheduled_samples(const RecordedStep& step) const;
  // Outputs were received.
  void end(const RecordedStep& step, std::int64_t last_output_before);
  void check_stopped(const RecordedStopped& stopped, const AuditRequest& request);
  // False: a request of a recording ended by a stop token, and the recording lists none for it.
  bool lists_ends() const { return lists_ends_; }
  // Reports (3) once outputs up to step `last` are received.
  void report_unheard(std::int64_t last);
  // At the end of a recording.
  void end();
  bool shows_queues() const { return !has_unlisted_ && (shows_queues_ || unqueued_.empty()); }

 private:
  struct Queued {
    const std::string* name;
    const char* queue;  // null: the running one
    const AuditRequest* request;
  };
  struct Unheard {
    AuditFinding finding;
    std::int64_t step = -1;  // whose output was not seen
  };
  void list_queued(const RecordedStep& step);
  void report_unsound() const;
  void report_unqueued();
  void withdraw(AuditRequest& request, std::size_t index, const std::string& why);
  void take_stale(const RecordedStep& step, const RecordedStaleOutput& output,
                  AuditRequest& request);

  BlockLedger& blocks_;
  bool is_live_check_;          // which leaves out waiting requests
  std::vector<Queued> queued_;  // of the step, in the order of the queues
  PerRequest<Ends> ends_;
  std::set<std::string> expected_ends_;  // of requests whose name another request has
  std::vector<Unheard> unheard_;
  bool lists_ends_ = true;
  bool shows_queues_;                             // a queue had a request
  bool has_unlisted_ = false;                     // a connector's queue is in no list
  bool has_scheduled_ = false;                    // a request
  std::map<std::string, AuditFinding> unqueued_;  // by cause, until a queue has a request
};

// Sessions: requests whose input arrives in chunks. A session that stops keeps its blocks and waits
// for input. Its next chunk replaces the last sampled token, and the session is scheduled as new.
//
// Invariants:
// (1) Only a live session receives a chunk (recording).
// (2) The tokens of a session are those of its chunks and the output that its engine keeps between
//     them: releases keep all computed tokens, or all but the last.
// (3) Outputs of steps after the one that stopped it are dropped.

class SessionLedger : Ledger {
 public:
  SessionLedger(AuditCore& core, OutputLedger& outputs, DraftLedger& drafts)
      : Ledger(core), outputs_(outputs), drafts_(drafts) {}

  void begin(const AuditRequest& request, const RecordedEvent& event);
  // A chunk, or the end of the input.
  void begin(const RecordedEvent& event);
  // An output stopped a request. False: it is not a session, or does not continue.
  bool end(const RecordedStopped& stopped, std::int64_t last_output, AuditRequest& request);

 private:
  struct Session {
    bool is_session = false;
    bool awaits_input = false;
    bool is_closed = false;  // no chunk arrives after the queued ones
    std::int32_t first_max_tokens = 0;
    std::vector<RequestSpec> chunks{};  // that wait
  };
  bool keeps_computed() const {
    return setup_.profile != nullptr && setup_.profile->sessions_keep_computed;
  }
  void begin_chunk(AuditRequest& session, const RequestSpec& chunk);

  OutputLedger& outputs_;
  DraftLedger& drafts_;
  PerRequest<Session> sessions_;
};

// Inputs other than tokens: images that an encoder computes, a grammar that a request waits for, a
// pooled output instead of tokens, and cross-attention to an encoder's rows.
//
// Invariants, each with the rule that it breaks:
// (1) A row computes tokens of an item only while the worker has the encoder's rows of the item
//     (inputs).
// (2) A request waits until its grammar is compiled (inputs).
// (3) A pooled output covers the whole prompt (sampled).
// (4) Cross-attention reads the rows that the encoder computed for the request (attention_read).

class InputLedger : Ledger {
 public:
  InputLedger(AuditCore& core, OutputLedger& outputs, const RecordingHeader& header);

  void begin(const AuditRequest& request, bool needs_grammar) {
    awaits_grammar_.begin(request) = needs_grammar;
  }
  void begin(const RecordedEvent& event);
  // A row is about to run.
  void check_grammar(const AuditRequest& request) const;
  // The encoder runs before the rows. Returns the rows that it computes.
  std::int64_t run_encoder(const RecordedStep& step);
  // Rows of all items that the worker has.
  std::int64_t num_rows_held() const;
  void step(std::span<const AuditRow> rows) const;
  // Cross-attention of all rows in one group.
  void read_encoder_rows(const RecordedStep& step, std::span<const AuditRow> rows,
                         std::size_t group);
  // Pooled outputs.
  void end(const RecordedStep& step);

 private:
  void read_encoder_rows(const AuditRow& row, std::size_t group, bool is_encoded);

  OutputLedger& outputs_;
  bool has_encoder_;
  bool has_cross_attention_;
  std::map<std::string, std::int32_t> encoded_;  // items whose rows the worker has: their rows
  PerRequest<std::uint8_t> awaits_grammar_;
};

}  // namespace lockstep
