// What every slot and every state page of a pool holds, as content ids: the auditor's book.
//
// A content id stands for a token and all before it; 0 means nothing was written since the block
// was handed out. A state page holds the content id of the last token that went into it, and its
// count.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
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
  // Memory is taken for what is written alone: a header may speak of any pool.
  explicit MemoryLedger(std::int64_t num_blocks) : num_blocks_(num_blocks) {}

  std::int64_t num_blocks() const { return num_blocks_; }
  // The block now belongs to `group`, with `block_size` slots of nothing.
  void hand_out(BlockId block, std::int32_t group, std::int32_t block_size) {
    Block& b = at(block);
    b.group = group;
    b.num_slots = block_size;
    b.slots.clear();
    b.state = {};
  }
  bool belongs_to(BlockId block, std::int32_t group) const { return at(block).group == group; }

  // REQUIRES: offset below the block size it was handed out with.
  void write(BlockId block, std::int32_t offset, const LedgerSlot& content) {
    Block& b = at(block);
    LS_CHECK(offset >= 0 && offset < b.num_slots, "slot {} of {} in block {}", offset, b.num_slots,
             index_of(block));
    if (std::cmp_greater_equal(offset, b.slots.size()))
      b.slots.resize(std::min(b.num_slots, std::max(2 * (offset + 1), 64)));
    b.slots[offset] = content;
  }
  LedgerSlot read(BlockId block, std::int32_t offset) const {
    const Block& b = at(block);
    return static_cast<std::size_t>(offset) < b.slots.size()
               ? b.slots[static_cast<std::size_t>(offset)]
               : LedgerSlot{};
  }

  void write_state(BlockId block, const LedgerState& state) { at(block).state = state; }
  const LedgerState& state(BlockId block) const { return at(block).state; }

 private:
  struct Block {
    std::int32_t group = -1;  // -1: never handed out
    std::int32_t num_slots = 0;
    std::vector<LedgerSlot> slots;  // up to the last that was written; nothing is in the others
    LedgerState state;
  };
  Block& at(BlockId block) {
    LS_CHECK(index_of(block) >= 0 && index_of(block) < num_blocks_, "block {} of {}",
             index_of(block), num_blocks_);
    if (std::cmp_greater_equal(index_of(block), blocks_.size()))
      blocks_.resize(index_of(block) + 1);
    return blocks_[index_of(block)];
  }
  const Block& at(BlockId block) const {
    static const Block kNeverHandedOut;
    return std::cmp_less(index_of(block), blocks_.size()) ? blocks_[index_of(block)]
                                                          : kNeverHandedOut;
  }

  std::int64_t num_blocks_;
  std::vector<Block> blocks_;  // up to the last that was touched
};

}  // namespace lockstep
