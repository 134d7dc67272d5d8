// What every slot and every state page of a pool holds, as content ids.
//
// Invariants:
// (1) A content id stands for a token and all tokens before it. 0: nothing was written since the
//     block was allocated.
// (2) A block has `block_size` slots of the group that it was last allocated to.
// (3) The slots of a run hold consecutive tokens of one prefix: the last one is right only if all
//     are.
//
// A state page has two parts, which the worker writes and copies at different times: the recurrent
// state, and the inputs of the next convolution.
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

struct PoolSlot {
  std::uint64_t content = 0;
  std::int32_t writer = -1;  // index of the request that wrote it
  std::int32_t position = -1;
  // Of the last following token that the draft model's entry depends on, in the writer's prefix.
  std::uint64_t next_content = 0;
};
// Instead of a `next_content`: none yet; a draft that the next step may accept; a rejected draft.
inline constexpr std::uint64_t kNothingBehind = 0;
inline constexpr std::uint64_t kDraftBehind = 1;
inline constexpr std::uint64_t kWrongDraftBehind = 2;

struct PoolState {
  std::uint64_t content = 0;     // of the last token in the recurrent state
  std::int32_t num_tokens = -1;  // in the recurrent state; -1: nothing was written
  std::int32_t writer = -1;
  // Inputs before token `inputs_before`, by the content of the previous token. With drafts, each
  // further entry is one token later.
  std::vector<std::uint64_t> inputs;
  std::int32_t inputs_before = -1;
};

// A request that a block was allocated to, and the step.
struct BlockOwner {
  std::int32_t request = -1;  // index; -1: none
  std::int64_t since = -1;
};

class PoolContents {
 public:
  // Allocates memory only for written blocks: a header may state any pool.
  explicit PoolContents(std::int64_t num_blocks) : num_blocks_(num_blocks) {}

  std::int64_t num_blocks() const { return num_blocks_; }
  // Gives the block to `group`, with `block_size` empty slots, and to request `holder`.
  void allocate(BlockId block, std::int32_t group, std::int32_t block_size, std::int32_t holder,
                std::int64_t step) {
    Block& b = at(block);
    b.holders = {BlockOwner{holder, step}, b.holders[0]};
    b.group = group;
    b.num_slots = block_size;
    b.not_loaded_in = -1;
    b.slots.clear();
    b.first_of_run = b.end_of_run = 0;
    b.state = {};
  }
  // Empties the block. Its group and its holders stay.
  void zero(BlockId block, std::int64_t step) {
    Block& b = at(block);
    b.slots.clear();
    b.first_of_run = b.end_of_run = 0;
    b.state = {};
    b.zeroed_in = step;
  }
  // The last request that the block was allocated to, and the previous one.
  const std::array<BlockOwner, 2>& holders(BlockId block) const { return at(block).holders; }
  // Last step that zeroed the block; -1: none.
  std::int64_t zeroed_in(BlockId block) const { return at(block).zeroed_in; }
  bool belongs_to(BlockId block, std::int32_t group) const { return at(block).group == group; }

  // `before` is the content of the previous token. REQUIRES: offset below the block size (2).
  void write(BlockId block, std::int32_t offset, const PoolSlot& content, std::uint64_t before) {
    Block& b = at(block);
    LS_CHECK(offset >= 0 && offset < b.num_slots, "slot {} of {} in block {}", offset, b.num_slots,
             index_of(block));
    if (std::cmp_greater_equal(offset, b.slots.size()))
      b.slots.resize(std::min(b.num_slots, std::max(2 * (offset + 1), 64)));
    const bool is_same = b.slots[offset].content == content.content;
    b.slots[offset] = content;
    if (is_same && offset < b.end_of_run) return;
    const bool continues =
        offset > b.first_of_run && offset <= b.end_of_run && b.slots[offset - 1].content == before;
    if (!continues) b.first_of_run = offset;
    b.end_of_run = offset + 1;
  }
  // Sets what is known of the following tokens.
  void set_behind(BlockId block, std::int32_t offset, std::uint64_t next_content) {
    Block& b = at(block);
    if (std::cmp_less(offset, b.slots.size())) b.slots[offset].next_content = next_content;
  }
  // True if slots [first, end) are part of a run (3).
  bool is_run(BlockId block, std::int32_t first, std::int32_t end) const {
    const Block& b = at(block);
    return first >= b.first_of_run && end <= b.end_of_run;
  }
  PoolSlot read(BlockId block, std::int32_t offset) const {
    const Block& b = at(block);
    return static_cast<std::size_t>(offset) < b.slots.size()
               ? b.slots[static_cast<std::size_t>(offset)]
               : PoolSlot{};
  }

  PoolState& state(BlockId block) { return at(block).state; }
  const PoolState& state(BlockId block) const { return at(block).state; }

  // Records that a load did not write the block.
  void set_not_loaded(BlockId block, std::int64_t step) { at(block).not_loaded_in = step; }
  // Last step whose load did not write the block, since it was allocated; -1: none.
  std::int64_t not_loaded_in(BlockId block) const { return at(block).not_loaded_in; }

  // Visits every request that holds or wrote a block.
  template <typename Visit>
  void for_each_request(const Visit& visit) const {
    for (const Block& block : blocks_) {
      for (const BlockOwner& holder : block.holders)
        if (holder.request >= 0) visit(holder.request);
      if (block.state.writer >= 0) visit(block.state.writer);
      for (const PoolSlot& slot : block.slots)
        if (slot.writer >= 0) visit(slot.writer);
    }
  }

  // Copies the contents of `from`, its group and its holders.
  void copy(BlockId from, BlockId to) {
    Block copied = at(from);
    at(to) = std::move(copied);
  }

 private:
  struct Block {
    std::int32_t group = -1;  // -1: never allocated
    std::int32_t num_slots = 0;
    std::int64_t zeroed_in = -1;
    std::int64_t not_loaded_in = -1;
    std::array<BlockOwner, 2> holders;
    std::vector<PoolSlot> slots;  // up to the last written one; the others are empty
    // The last run that was written: (3).
    std::int32_t first_of_run = 0;
    std::int32_t end_of_run = 0;
    PoolState state;
  };
  Block& at(BlockId block) {
    LS_CHECK(index_of(block) >= 0 && index_of(block) < num_blocks_, "block {} of {}",
             index_of(block), num_blocks_);
    if (std::cmp_greater_equal(index_of(block), blocks_.size()))
      blocks_.resize(index_of(block) + 1);
    return blocks_[index_of(block)];
  }
  const Block& at(BlockId block) const {
    static const Block kNeverAllocated;
    return std::cmp_less(index_of(block), blocks_.size()) ? blocks_[index_of(block)]
                                                          : kNeverAllocated;
  }

  std::int64_t num_blocks_;
  std::vector<Block> blocks_;  // up to the last one that was used
};

}  // namespace lockstep
