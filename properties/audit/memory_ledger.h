// What every slot and every state page of a pool holds, as content ids: the auditor's book.
//
// A content id stands for a token and all before it; 0 means nothing was written since the block
// was handed out. A state page holds the content id of the last token that went into it, and its
// count.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/ids.h"

namespace lockstep {

struct LedgerSlot {
  std::uint64_t content = 0;
  std::int32_t writer = -1;  // index of the request that wrote it
  std::int32_t position = -1;
  std::uint64_t next_content = 0;  // of the token behind, as its writer had it; 0: not known yet
};

struct LedgerState {
  std::uint64_t content = 0;  // 0 with num_tokens = 0: the zero state; with -1: nothing written
  std::int32_t num_tokens = -1;
  std::int32_t writer = -1;
};

class MemoryLedger {
 public:
  explicit MemoryLedger(std::int64_t num_blocks) : blocks_(static_cast<std::size_t>(num_blocks)) {}

  std::int64_t num_blocks() const { return static_cast<std::int64_t>(blocks_.size()); }
  // The block now belongs to `group`, with `block_size` slots of nothing.
  void hand_out(BlockId block, std::int32_t group, std::int32_t block_size);
  bool belongs_to(BlockId block, std::int32_t group) const { return at(block).group == group; }

  // REQUIRES: offset below the block size it was handed out with.
  void write(BlockId block, std::int32_t offset, const LedgerSlot& content);
  LedgerSlot read(BlockId block, std::int32_t offset) const;

  void write_state(BlockId block, const LedgerState& state) { at(block).state = state; }
  const LedgerState& state(BlockId block) const { return at(block).state; }

 private:
  struct Block {
    std::int32_t group = -1;
    std::vector<LedgerSlot> slots;
    LedgerState state;
  };
  Block& at(BlockId block) { return blocks_[static_cast<std::size_t>(index_of(block))]; }
  const Block& at(BlockId block) const {
    return blocks_[static_cast<std::size_t>(index_of(block))];
  }

  std::vector<Block> blocks_;
};

}  // namespace lockstep
