// Which request holds which blocks, from what was handed over to the worker.
//
// Invariants, each with the rule that it breaks:
// (1) A block that is allocated as new is one that no live request still reads, loads or sends
//     (handed_out). The same holds for the target of a copy.
// (2) A new block of attention next to recurrent states is zeroed (zeroing).
// (3) The scheduler's tables are those that the worker was given, apart from blocks that a window
//     has passed (handed_out).
// (4) Blocks held and free add up to the pool, where a recording shows its tables or no request
//     runs; no block is in the tables of two groups (conservation).
// (5) Blocks reported as common to the batch are the first ones of every running table
//     (common_prefix).
// (6) A table has the slots that the drafts of a step need (draft_slots) and no block more than the
//     tokens and drafts of its request need, nor a state more than a worker's row has space for
//     (excess_blocks).
// (7) A request holds as many recurrent states as the pool is planned for (planned_blocks).
// (8) A running request continues after its last computed token (computed_again). The blocks that a
//     request drops as it starts over are not reported again.
//
// Not checked: which blocks a policy chooses.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "properties/audit/audit_setup.h"

namespace lockstep {

class BlockLedger : Ledger {
 public:
  BlockLedger(AuditCore& core, const RecordingHeader& header);

  void begin(const AuditRequest& request) { held_.begin(request); }
  // Before the decision: blocks that the step zeroes hold nothing.
  void begin(const RecordedStep& step);
  // After the rows of the step ran: rules over all requests.
  void step(const RecordedStep& step);
  void check_shown_tables(const RecordedStep& step);
  // At the end of a recording: blocks that were allocated again were not lost.
  void end();
  // False: no step showed all holders of blocks, with the free blocks.
  bool adds_up_blocks() const { return adds_up_blocks_ || in_use_.empty(); }

  // A request is new to the worker: it gets an empty table. `keeps_table`: it continues a session.
  // Requires: its transfer is still what it was before the step.
  void restart(AuditRequest& request, std::int32_t computed, bool keeps_table);
  // Appends the blocks that a row hands over; `hit` tokens of a new request were in the pool.
  // False: no blocks are handed over.
  bool extend(const RecordedScheduled& row, AuditRequest& request, std::int32_t hit);
  // A block becomes part of a table without being a hit.
  void allocate(const AuditRequest& request, std::size_t group, std::size_t index, BlockId block);
  // The table covers tokens up to `end`, and drafts after them.
  void reserve(const AuditRequest& request, std::int32_t end);
  // The table covers a load.
  void reserve_load(const AuditRequest& request) {
    held_[request].reserved_to = request.computed + setup_.draft_slots;
  }
  void check_size(const AuditRow& row);
  void check_draft_slots(const RecordedScheduled& scheduled, const AuditRow& row, bool was_loaded);
  void check_progress_of(const AuditRow& row);
  void note_computed(const AuditRequest& request) { held_[request].computed_in = step_number(); }
  // The engine may count dropped outputs as rejected drafts.
  void note_withdrawn(const AuditRequest& request) { held_[request].has_withdrawn = true; }

  // First table entry that a request at token `reached` still needs.
  std::size_t first_needed(const AuditRequest& request, std::size_t group,
                           std::int32_t reached) const;
  // Tokens of the prompt [result, position) that reference windows skip end here; 0: none.
  std::int32_t gap_end(const AuditRequest& request, std::size_t group, std::int32_t position) const;
  // Hit tokens [first, last) that windows compute again.
  std::int32_t first_replayed(const AuditRequest& request) const {
    return held_[request].first_replayed;
  }
  std::int32_t last_replayed(const AuditRequest& request) const {
    return held_[request].last_replayed;
  }
  // False: a recording leaves out the copy of a block that a hit ends in.
  bool tells_copies() const { return tells_copies_; }
  bool is_zeroed_now(BlockId block) const { return std::ranges::binary_search(zeroed_now_, block); }

 private:
  struct Held {
    std::int32_t reserved_to = 0;   // end of the tokens and draft slots that the table covers
    std::int64_t computed_in = -1;  // last step that computed tokens
    bool has_withdrawn = false;     // output of it was dropped
    bool starts_over = false;       // reported: (8)
    std::int32_t first_replayed = 0;
    std::int32_t last_replayed = 0;
    std::vector<std::vector<BlockId>> kept{};  // of a session, until it is scheduled again
  };
  struct Leak {
    std::size_t finding = 0;  // its number
    std::int64_t step = -1;
    std::string what;
    std::int64_t num_missing = 0;
    std::vector<BlockId> candidates;  // blocks that were released since the total was right
  };
  const AuditRequest* reader_of(BlockId block, const AuditRequest* holder) const;
  bool is_hit(std::size_t group, std::size_t index, std::int32_t hit) const;
  void check_copies(const RecordedStep& step);
  void check_conservation(const RecordedStep& step);
  // Sets of blocks, ascending.
  std::vector<BlockId> shown_blocks(const std::vector<RecordedTable>& tables) const;
  std::vector<BlockId> kept_by_transfers(bool counts_drafts) const;
  void report_leak(std::string what, std::int64_t num_missing, const std::vector<BlockId>& held);
  std::string lost_text(const Leak& leak) const;
  void check_common_prefix(const RecordedStep& step);
  void check_planned(const RecordedStep& step);
  void check_states(const AuditRow& row, std::size_t group) const;
  void check_tables(const RecordedStep& step);

  bool draft_slots_at_once_;     // also of a new request
  bool keeps_states_of_drafts_;  // a spare state per draft, until the draft is accepted
  bool shows_all_holders_;
  bool tells_copies_;
  std::vector<bool> is_zeroed_;  // per group: (2)
  PerRequest<Held> held_;
  std::vector<BlockId> zeroed_now_;  // in the current step, ascending
  std::vector<BlockId> fresh_;       // of these, in no table yet
  std::int64_t num_copied_ = 0;      // ends of copies that may not have run
  std::int64_t num_copied_before_ = 0;
  std::int64_t in_flight_max_ = 0;  // steps without output when another one was decided
  std::int64_t odd_total_ = -1;     // of blocks held and free, when it was last reported
  bool lists_running_ = false;      // a step has shown a running request
  bool adds_up_blocks_ = false;
  std::vector<BlockId> in_use_;         // held when the total was last right, or allocated since
  std::set<std::int32_t> starts_over_;  // requests, by index
  std::vector<Leak> leaks_;
};

}  // namespace lockstep
