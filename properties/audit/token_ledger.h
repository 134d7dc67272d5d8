// What attention writes and reads, slot by slot.
//
// Invariants, each with the rule that it breaks:
// (1) A row writes each of its tokens to a block of its group inside its table, never to the null
//     block, and never over a token that another request still reads (token_write).
// (2) Every slot that attention reads holds that token after the request's own prefix
//     (attention_read).
// (3) A ring of keys is one block of the request, as long as the request runs (token_write).
//
// A layer writes the keys of the whole batch before any row attends. Not checked: the keys that a
// ring holds at the end of a hit.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "properties/audit/block_ledger.h"
#include "properties/audit/hit_ledger.h"

namespace lockstep {

class TokenLedger : Ledger {
 public:
  // `hits`: null without a count of hits.
  TokenLedger(AuditCore& core, const BlockLedger& blocks, HitLedger* hits)
      : Ledger(core), blocks_(blocks), hits_(hits) {}

  // Writes and reads of all rows in one group of attention.
  void step(std::span<const AuditRow> rows, std::size_t group);
  // A transfer writes token `position`. False: the block is not one of the group, reported.
  bool load(const AuditRequest& request, std::size_t group, std::int32_t position, BlockId block);
  // "token 4 of request a", or why the slot holds nothing.
  std::string content_text(const PoolSlot& slot, BlockId block) const;
  // ": the same tokens under another cache salt (...)" if only keys differ; empty: more differs.
  std::string key_difference_to(const AuditRequest& request, std::int32_t position,
                                std::uint64_t content, std::int32_t writer) const;

 private:
  void write(const AuditRow& row, std::size_t group);
  void check_overwritten(const AuditRow& row, std::size_t group, std::int32_t position,
                         const PoolSlot& before, BlockId block) const;
  void read(const AuditRow& row, std::size_t group);
  void use_ring(const AuditRow& row, std::size_t group) const;
  std::string why_nothing(BlockId block) const;
  std::string difference(const AuditRequest& request, std::int32_t position,
                         const PoolSlot& slot) const;

  const BlockLedger& blocks_;
  HitLedger* hits_;
};

}  // namespace lockstep
