#include "sim/audit/memory_ledger.h"

#include <algorithm>

#include "reference/check.h"

namespace lockstep {

const MemoryLedger::Block& MemoryLedger::at(BlockId block) const {
  static const Block kNeverHandedOut;
  const auto index = static_cast<std::size_t>(index_of(block));
  return index < blocks_.size() ? blocks_[index] : kNeverHandedOut;
}

MemoryLedger::Block& MemoryLedger::at(BlockId block) {
  const auto index = static_cast<std::size_t>(index_of(block));
  LS_CHECK(index_of(block) < num_blocks_, "block {} of {}", index_of(block), num_blocks_);
  if (index >= blocks_.size()) blocks_.resize(index + 1);
  return blocks_[index];
}

void MemoryLedger::hand_out(BlockId block, std::int32_t group, std::int32_t block_size) {
  Block& b = at(block);
  b.group = group;
  b.num_slots = block_size;
  b.slots.clear();
  b.state = {};
}

void MemoryLedger::write(BlockId block, std::int32_t offset, const LedgerSlot& content) {
  Block& b = at(block);
  LS_CHECK(offset >= 0 && offset < b.num_slots, "slot {} of {} in block {}", offset, b.num_slots,
           index_of(block));
  const auto slot = static_cast<std::size_t>(offset);
  if (slot >= b.slots.size())
    b.slots.resize(std::min<std::size_t>(static_cast<std::size_t>(b.num_slots),
                                         std::max<std::size_t>(2 * (slot + 1), 64)));
  b.slots[slot] = content;
}

LedgerSlot MemoryLedger::read(BlockId block, std::int32_t offset) const {
  const Block& b = at(block);
  return static_cast<std::size_t>(offset) < b.slots.size()
             ? b.slots[static_cast<std::size_t>(offset)]
             : LedgerSlot{};
}

}  // namespace lockstep
