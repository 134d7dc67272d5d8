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
#include <vector>

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

// Recurrent states: which block a row reads its state from, and where it writes the next one
// (vllm/v1/worker/mamba_utils.py; in 0.33.0 model runner V2, v1/worker/gpu/model_states/
// mamba_hybrid.py).
//
// Invariants, each with the rule that it breaks:
// (1) A row reads the state after exactly its first `first` tokens, of its own prefix, from a block
//     of the group (state_read). A state has two parts, which the worker writes and copies at
//     different times: the recurrent state and the inputs of the next convolution.
// (2) A prefill exports a checkpoint only into a block of its group (token_write).
//
// The worker appends to its tables and never removes an entry: it may read a block that the
// scheduler's table no longer has.

class StateLedger : Ledger {
 public:
  // `hits`: null without a count of hits.
  StateLedger(AuditCore& core, const TokenLedger& tokens, HitLedger* hits)
      : Ledger(core), tokens_(tokens), hits_(hits) {}

  void begin(const AuditRequest& request) { running_.begin(request).resize(num_groups()); }
  // Before the rows run, the worker copies states to the entries where they continue.
  void begin(const AuditRow& row);
  // The rows of a step run one group of states.
  void step(std::span<const AuditRow> rows, std::size_t group);
  // The output accepts some drafts: their state is copied to where the next step reads it.
  void end(const AuditRow& row, std::int32_t num_sampled);

 private:
  struct Running {
    std::int32_t entry = -1;        // of the running state, mode align; -1: none
    std::int32_t num_accepted = 1;  // tokens that the last step kept
  };
  bool find_block(const AuditRow& row, std::size_t group, std::int32_t entry, BlockId& block) const;
  void advance(const AuditRow& row, std::size_t group);
  void advance_in_every_block(const AuditRow& row, std::size_t group);
  void export_checkpoint(const AuditRow& row, std::size_t group, std::int32_t current);
  void read(const AuditRow& row, std::size_t group, std::int32_t entry, std::int32_t accepted,
            std::int32_t count);
  void write_inputs(const AuditRow& row, std::size_t group, std::int32_t entry,
                    std::int32_t first_count, std::int32_t last_count);
  void write_recurrent(const AuditRow& row, std::size_t group, std::int32_t entry,
                       std::int32_t count);
  void copy(const AuditRow& row, std::size_t group, std::int32_t from, std::int32_t accepted,
            std::int32_t to);

  const TokenLedger& tokens_;
  HitLedger* hits_;
  PerRequest<std::vector<Running>> running_;  // by group
};

}  // namespace lockstep
