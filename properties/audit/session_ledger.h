// Sessions: requests whose input arrives in chunks. A session that stops keeps its blocks and waits
// for input. Its next chunk replaces the last sampled token, and the session is scheduled as new.
//
// Invariants:
// (1) Only a live session receives a chunk (recording).
// (2) The tokens of a session are those of its chunks and the output that its engine keeps between
//     them: releases keep all computed tokens, or all but the last.
// (3) Outputs of steps after the one that stopped it are dropped.
#pragma once

#include <cstdint>
#include <vector>

#include "properties/audit/draft_ledger.h"
#include "properties/audit/output_ledger.h"

namespace lockstep {

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

}  // namespace lockstep
