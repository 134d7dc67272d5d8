// Drafts: which tokens were proposed for a request, and what a draft model of EAGLE or MTP reads.
//
// Invariants, each with the rule that it breaks:
// (1) A row verifies the drafts that were proposed after its last token, from the first on, and a
//     request keeps drafts for a later step only while it runs (drafts).
// (2) The draft model's KV entry of a token depends on the next tokens: on one, or with several
//     modules on as many as there are modules (vllm/v1/worker/gpu/spec_decode/multi_module_mtp/
//     speculator.py). A hit with hashes that look ahead ends after a token that the same tokens
//     followed (draft_read).
// (3) Tokens that the draft model computes again after rejected drafts have their window
//     (draft_read).
//
// Not checked: other layers of a draft model.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "properties/audit/token_ledger.h"

namespace lockstep {

class DraftLedger : Ledger {
 public:
  DraftLedger(AuditCore& core, const TokenLedger& tokens, const RecordingHeader& header);

  void begin(const AuditRequest& request) { drafts_.begin(request); }
  // A preemption, a reset or a session's stop drops the proposed drafts.
  void drop(const AuditRequest& request) { drafts_[request].proposed.clear(); }
  // A row uses its drafts up.
  void step(const RecordedScheduled& row, const AuditRequest& request);
  void check_held(const RecordedStep& step) const;
  // With the step's output, the draft model runs over the whole batch, and proposes drafts.
  void end(const RecordedStep& step, std::span<const AuditRow> rows);
  // True if a hit ended before embeddings of which only a digest of several tokens is recorded.
  bool meets_digest() const { return meets_digest_; }

 private:
  struct Drafts {
    std::vector<std::int32_t> proposed{};  // since the request was last scheduled
    std::int64_t step = -1;                // that proposed them
  };
  std::int32_t num_run_again(const AuditRow& row) const;
  void finish_rows(const AuditRow& row);
  void read_hit(const AuditRow& row);
  void read_window(const AuditRow& row) const;

  const TokenLedger& tokens_;
  bool proposes_in_time_;  // a step's drafts are in its own output, and the next step verifies them
  bool are_proposals_shown_ = false;
  bool meets_digest_ = false;
  PerRequest<Drafts> drafts_;
};

}  // namespace lockstep
