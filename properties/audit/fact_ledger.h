// What the engine's own worker reports about a step, compared with the decision and with the
// memory that the audit follows.
//
// Invariants, each with the rule that it breaks:
// (1) The worker runs the scheduled requests, each with its tokens and from its position
//     (worker_batch).
// (2) Its tables are those that were handed over (worker_table).
// (3) It writes each token to the token's slot (worker_slot).
// (4) Bytes change in the slots of the step and nowhere else (worker_page).
// (5) It zeroes the blocks that the step zeroes, and no others (worker_zeroing).
//
// Not checked: digests of pages, which depend on the engine's own numbers.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "properties/audit/block_ledger.h"

namespace lockstep {

class FactLedger : Ledger {
 public:
  FactLedger(AuditCore& core, const BlockLedger& blocks) : Ledger(core), blocks_(blocks) {}

  // Before the rows change the memory that the audit follows.
  void step(const RecordedStep& step, std::span<const AuditRow> rows);

 private:
  using Report = std::function<void(BlockId block, std::string what)>;

  void check_batch(const RecordedStep& step, const WorkerStepFacts& facts) const;
  void check_zeroed(const RecordedStep& step, const WorkerStepFacts& facts) const;
  void check_row(const WorkerStepFacts& facts, const AuditRow& row, std::size_t at,
                 std::size_t first) const;
  bool check_table(const std::vector<BlockId>& said, const AuditRow& row, std::size_t group) const;
  void check_slots(const std::vector<Slot>& said, const AuditRow& row, std::size_t group,
                   std::size_t first) const;
  void check_changed(const RecordedStep& step, const WorkerStepFacts& facts,
                     std::span<const AuditRow> rows) const;
  void check_written(BlockId block, std::int32_t slot, const WorkerStepFacts& facts,
                     const Report& report_block) const;
  std::map<BlockId, std::map<std::int32_t, bool>> slots_to_write(
      std::span<const AuditRow> rows) const;
  bool may_change_entirely(BlockId block, std::span<const AuditRow> rows) const;

  const BlockLedger& blocks_;
  bool has_gap_ = false;  // the worker reported nothing of some step
};

}  // namespace lockstep
