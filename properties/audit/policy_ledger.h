// Rules about policy: which requests run, and how many. Absent when only rules about memory are
// checked.
//
// Invariants, each with the rule that it breaks:
// (1) A step has no more tokens, requests, adapters and encoder rows than a worker has room for
//     (limits).
// (2) Under policy `priority`, no request is preempted while a less important one continues
//     (victim).
// (3) With the pool to itself, a request runs to its end: the pool was planned for it (standstill).
// (4) A recording does not end in a deadlock (standstill).
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "properties/audit/kv_transfer_ledger.h"

namespace lockstep {

class PolicyLedger : Ledger {
 public:
  PolicyLedger(AuditCore& core, const KvTransferLedger& transfers, const RecordingHeader& header);

  void begin(const AuditRequest& request, std::int32_t priority) {
    priorities_.begin(request) = priority;
  }
  void begin(const RecordedEvent& event);
  void check_victims(const RecordedStep& step) const;
  void check_adapters(const RecordedStep& step) const;
  void check_encoder(std::int64_t num_rows) const;
  void check_batch(const RecordedStep& step) const;
  // Rules about the decision: (3).
  void step(const RecordedStep& step);
  // After the last step: (4).
  void end();

 private:
  const KvTransferLedger& transfers_;
  std::optional<std::int32_t> adapters_max_;
  std::optional<std::int32_t> encoder_rows_max_;  // absent: no encoder
  bool knows_max_tokens_;
  bool knows_max_requests_;
  std::int64_t planned_blocks_;  // of the longest request
  bool checks_progress_;         // only the scheduler makes a request wait, in a planned pool
  PerRequest<std::int32_t> priorities_;
  PauseState pause_state_ = PauseState::unpaused;
  int num_idle_steps_ = 0;   // with requests waiting and all blocks free
  bool had_orders_ = false;  // of clients, during the previous step
  RecordedStep last_;        // its queues
};

}  // namespace lockstep
