// Inputs other than tokens: images that an encoder computes, a grammar that a request waits for, a
// pooled output instead of tokens, and cross-attention to an encoder's rows.
//
// Invariants, each with the rule that it breaks:
// (1) A row computes tokens of an item only while the worker has the encoder's rows of the item
//     (inputs).
// (2) A request waits until its grammar is compiled (inputs).
// (3) A pooled output covers the whole prompt (sampled).
// (4) Cross-attention reads the rows that the encoder computed for the request (attention_read).
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <span>
#include <string>

#include "properties/audit/output_ledger.h"

namespace lockstep {

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
  std::set<std::string> encoded_;  // items whose rows the worker has
  PerRequest<std::uint8_t> awaits_grammar_;
};

}  // namespace lockstep
