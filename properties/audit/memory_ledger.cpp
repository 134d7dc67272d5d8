#include "properties/audit/memory_ledger.h"

#include "base/check.h"

namespace lockstep {

void MemoryLedger::hand_out(BlockId block, std::int32_t group, std::int32_t block_size) {
  Block& b = at(block);
  b.group = group;
  b.slots.assign(static_cast<std::size_t>(block_size), {});
  b.state = {};
}

void MemoryLedger::write(BlockId block, std::int32_t offset, const LedgerSlot& content) {
  Block& b = at(block);
  LS_CHECK(static_cast<std::size_t>(offset) < b.slots.size(), "slot {} of {} in block {}", offset,
           b.slots.size(), index_of(block));
  b.slots[static_cast<std::size_t>(offset)] = content;
}

LedgerSlot MemoryLedger::read(BlockId block, std::int32_t offset) const {
  const Block& b = at(block);
  return static_cast<std::size_t>(offset) < b.slots.size()
             ? b.slots[static_cast<std::size_t>(offset)]
             : LedgerSlot{};
}

}  // namespace lockstep
