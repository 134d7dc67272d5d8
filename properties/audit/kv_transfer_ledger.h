// Loads and sends of a KV connector: the blocks that a transfer writes, and the requests that keep
// blocks for it. A recording says when a load has completed and which blocks it did not fill; the
// others then hold the request's own prefix.
//
// Invariants, each with the rule that it breaks:
// (1) A load starts with an answer of the connector, and covers tokens that the request has
//     (transfer).
// (2) A load or a send completes once, and only if it is in flight (transfer).
// (3) Tokens that were sampled after a lost block are dropped: no client receives them
//     (attention_read).
//
// Not checked: whether the connector moves the right bytes.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "properties/audit/block_ledger.h"
#include "properties/audit/token_ledger.h"

namespace lockstep {

class KvTransferLedger : Ledger {
 public:
  KvTransferLedger(AuditCore& core, BlockLedger& blocks, TokenLedger& tokens)
      : Ledger(core), blocks_(blocks), tokens_(tokens) {}

  void begin(const AuditRequest& request) { loads_.begin(request); }
  // Before the decision: a request whose load failed holds nothing.
  void begin(const RecordedStep& step);
  // After the running requests have their tables, which a load may have hit.
  void step(const RecordedStep& step);
  // Marks the rows whose attention read a block that was not filled.
  void void_rows(const RecordedStep& step, std::vector<AuditRow>& rows);
  // Outputs up to step `last` are received, and with them the worker's reports.
  void end(const RecordedStep& step, std::int64_t last);
  // Reports the requests that are still adrift when their output is delivered.
  void report_adrift(const RecordedStep& step, std::int64_t last);

  // Tokens of a scheduled request that were in its table before the step.
  std::int32_t num_hit(const RecordedStep& step, const RecordedScheduled& row,
                       const AuditRequest& request) const;
  // End of the tokens that the connector loads for it within the step; 0: none.
  static std::int32_t loaded_to(const RecordedStep& step, const RecordedScheduled& row);
  // A load within the step fills positions [first, last), apart from invalid blocks.
  void load(const AuditRequest& request, std::int32_t first, std::int32_t last,
            std::span<const BlockId> invalid);
  // The states of a group after tokens in (first, end].
  void load_states(const AuditRequest& request, std::size_t group, std::int32_t first,
                   std::int32_t end, std::span<const BlockId> invalid);
  // True for a row that was decided before the lost block was known: it is computed again.
  bool is_dropped(const RecordedStep& step, const RecordedScheduled& row, AuditRequest& request);
  // The request has finished. Its blocks stay while a transfer needs them.
  void release(const RecordedStep& step, const std::string& name);
  std::int64_t held_since(const AuditRequest& request) const { return loads_[request].held_since; }

 private:
  struct Load {
    std::int32_t first = 0;          // tokens before it were hit here
    std::vector<BlockId> invalid{};  // blocks that the load did not fill
    std::int64_t held_since = -1;    // step of the load
    std::int64_t adrift_since = -1;
    std::string adrift{};  // the finding, until the request fails or its client disconnects
  };
  void begin_load(const RecordedStep& step, const RecordedTable& loading);
  void receive(const RecordedWorker& worker);
  std::int32_t first_invalid(const AuditRequest& request, std::int32_t computed,
                             std::span<const BlockId> invalid) const;
  void forgive_undelivered(const RecordedStep& step);

  BlockLedger& blocks_;
  TokenLedger& tokens_;
  PerRequest<Load> loads_;
  std::map<std::int64_t, RecordedWorker> in_flight_;  // reports by step, not received yet
  std::optional<std::int64_t> last_output_of_step_;   // of the previous step
  bool has_adrift_ = false;                           // a request has been adrift
};

// Rules about policy: which requests run, and how many. Absent when only rules about memory are
// checked.
//
// Invariants, each with the rule that it breaks:
// (1) A step has no more tokens, requests, adapters, encoder rows and drafts per request than a
//     worker has room for (limits).
// (2) Under policy `priority`, no request is preempted while a less important one continues
//     (victim).
// (3) With the pool to itself, a request runs to its end: the pool was planned for it (standstill).
// (4) A recording does not end in a deadlock (standstill).
// (5) A paused scheduler schedules no request, or admits none (limits).
// (6) A running request is scheduled again unless something prevents it (standstill).

class PolicyLedger : Ledger {
 public:
  PolicyLedger(AuditCore& core, const KvTransferLedger& transfers, const RecordingHeader& header);

  void begin(const AuditRequest& request, std::int64_t priority) {
    priorities_.begin(request) = priority;
    waits_.begin(request);
  }
  void begin(const RecordedEvent& event);
  void check_victims(const RecordedStep& step) const;
  void check_adapters(const RecordedStep& step) const;
  // `num_rows` are encoded in the step, after which the worker holds `num_held`.
  void check_encoder(std::int64_t num_rows, std::int64_t num_held) const;
  void check_batch(const RecordedStep& step) const;
  // Rules about the decision: (3) and (6).
  void step(const RecordedStep& step);
  // After the last step: (4).
  void end();

 private:
  // Steps that do not schedule a running request.
  struct Wait {
    std::int64_t since = -1;  // its last row
    std::int64_t num_steps = 0;
  };
  void check_pause(const RecordedStep& step) const;
  void check_running(const RecordedStep& step);
  bool could_run(const RecordedStep& step, const AuditRequest& request, bool is_decoding) const;

  const KvTransferLedger& transfers_;
  std::optional<std::int32_t> adapters_max_;
  std::optional<std::int32_t> encoder_rows_max_;   // absent: no encoder
  std::optional<std::int32_t> encoder_cache_max_;  // rows; absent: no limit
  bool knows_max_tokens_;
  bool knows_max_requests_;
  bool knows_max_drafts_;
  std::int64_t planned_blocks_;  // of the longest request
  bool checks_progress_;         // only the scheduler makes a request wait, in a planned pool
  PerRequest<std::int64_t> priorities_;
  PerRequest<Wait> waits_;
  PauseState pause_state_ = PauseState::unpaused;
  int num_idle_steps_ = 0;   // with requests waiting and all blocks free
  bool had_orders_ = false;  // of clients, during the previous step
  RecordedStep last_;        // its queues, where no request runs with a connector
};

}  // namespace lockstep
