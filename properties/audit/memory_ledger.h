// What every slot and every state page of a pool holds, as content ids: the auditor's book.
//
// A content id stands for a token and all before it; 0 means nothing was written since the block
// was handed out. A state page has two parts, which the worker writes and copies at different
// times: the recurrent state, and the inputs that the next convolution needs.
#pragma once

#include <algorithm>
#include <array>
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
  // Of the last token behind that the drafter made its row of, as the writer had it.
  std::uint64_t next_content = 0;
};
// Instead of a `next_content`: none yet; a draft that the next step may prove right; a draft that
// it did not.
inline constexpr std::uint64_t kNothingBehind = 0;
inline constexpr std::uint64_t kDraftBehind = 1;
inline constexpr std::uint64_t kWrongDraftBehind = 2;

struct LedgerState {
  std::uint64_t content = 0;     // of the last token that went into the recurrent state
  std::int32_t num_tokens = -1;  // that went in; -1: nothing was written
  std::int32_t writer = -1;
  // The inputs before token `inputs_before`, by the content of the token in front of it; and with
  // drafts, one token further with each further entry.
  std::vector<std::uint64_t> inputs;
  std::int32_t inputs_before = -1;
};

// Who has had a block, and since which step.
struct LedgerHolder {
  std::int32_t request = -1;  // index; -1: nobody
  std::int64_t since = -1;
};

class MemoryLedger {
 public:
  // Memory is taken for what is written alone: a header may speak of any pool.
  explicit MemoryLedger(std::int64_t num_blocks) : num_blocks_(num_blocks) {}

  std::int64_t num_blocks() const { return num_blocks_; }
  // The block now belongs to `group`, with `block_size` slots of nothing; request `holder` has it.
  void hand_out(BlockId block, std::int32_t group, std::int32_t block_size, std::int32_t holder,
                std::int64_t step) {
    Block& b = at(block);
    b.holders = {LedgerHolder{holder, step}, b.holders[0]};
    b.group = group;
    b.num_slots = block_size;
    b.not_loaded_in = -1;
    b.slots.clear();
    b.first_of_run = b.end_of_run = 0;
    b.state = {};
  }
  // It holds nothing any more; whose it is does not change.
  void zero(BlockId block, std::int64_t step) {
    Block& b = at(block);
    b.slots.clear();
    b.first_of_run = b.end_of_run = 0;
    b.state = {};
    b.zeroed_in = step;
  }
  // The last one that it was handed out to, and the one before.
  const std::array<LedgerHolder, 2>& holders(BlockId block) const { return at(block).holders; }
  // The last step that did, since when it was written to or not; -1: none.
  std::int64_t zeroed_in(BlockId block) const { return at(block).zeroed_in; }
  bool belongs_to(BlockId block, std::int32_t group) const { return at(block).group == group; }

  // `before` is the content of the token in front of this one.
  // REQUIRES: offset below the block size it was handed out with.
  void write(BlockId block, std::int32_t offset, const LedgerSlot& content, std::uint64_t before) {
    Block& b = at(block);
    LS_CHECK(offset >= 0 && offset < b.num_slots, "slot {} of {} in block {}", offset, b.num_slots,
             index_of(block));
    if (std::cmp_greater_equal(offset, b.slots.size()))
      b.slots.resize(std::min(b.num_slots, std::max(2 * (offset + 1), 64)));
    const bool is_same = b.slots[offset].content == content.content;
    b.slots[offset] = content;
    if (is_same && offset < b.end_of_run) return;
    const bool goes_on =
        offset > b.first_of_run && offset <= b.end_of_run && b.slots[offset - 1].content == before;
    if (!goes_on) b.first_of_run = offset;
    b.end_of_run = offset + 1;
  }
  // What is known by now of the tokens behind.
  void set_behind(BlockId block, std::int32_t offset, std::uint64_t next_content) {
    Block& b = at(block);
    if (std::cmp_less(offset, b.slots.size())) b.slots[offset].next_content = next_content;
  }
  // Whether slots [first, end) hold tokens of one prefix, one after the other: then the last is
  // right only if all are.
  bool is_run(BlockId block, std::int32_t first, std::int32_t end) const {
    const Block& b = at(block);
    return first >= b.first_of_run && end <= b.end_of_run;
  }
  LedgerSlot read(BlockId block, std::int32_t offset) const {
    const Block& b = at(block);
    return static_cast<std::size_t>(offset) < b.slots.size()
               ? b.slots[static_cast<std::size_t>(offset)]
               : LedgerSlot{};
  }

  LedgerState& state(BlockId block) { return at(block).state; }
  const LedgerState& state(BlockId block) const { return at(block).state; }

  // A load was to write it and did not.
  void set_not_loaded(BlockId block, std::int64_t step) { at(block).not_loaded_in = step; }
  // The last step of which that was said since the block was handed out; -1: none.
  std::int64_t not_loaded_in(BlockId block) const { return at(block).not_loaded_in; }

  // Whoever has had a block or written to it.
  template <typename Visit>
  void for_each_request(const Visit& visit) const {
    for (const Block& block : blocks_) {
      for (const LedgerHolder& holder : block.holders)
        if (holder.request >= 0) visit(holder.request);
      if (block.state.writer >= 0) visit(block.state.writer);
      for (const LedgerSlot& slot : block.slots)
        if (slot.writer >= 0) visit(slot.writer);
    }
  }

  // All that `from` holds, and whose it is.
  void copy(BlockId from, BlockId to) {
    Block copied = at(from);
    at(to) = std::move(copied);
  }

 private:
  struct Block {
    std::int32_t group = -1;  // -1: never handed out
    std::int32_t num_slots = 0;
    std::int64_t zeroed_in = -1;
    std::int64_t not_loaded_in = -1;
    std::array<LedgerHolder, 2> holders;
    std::vector<LedgerSlot> slots;  // up to the last that was written; nothing is in the others
    // A run: slots whose tokens follow one another in one prefix. The last one that was written.
    std::int32_t first_of_run = 0;
    std::int32_t end_of_run = 0;
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
