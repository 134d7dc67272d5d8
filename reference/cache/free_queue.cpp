#include "reference/cache/free_queue.h"

#include <bit>

#include "base/check.h"

namespace lockstep {

FreeQueue::FreeQueue(std::int64_t num_blocks)
    : ring_(std::bit_ceil(static_cast<std::size_t>(2 * num_blocks)), kNullBlock),
      place_(num_blocks),
      mask_(static_cast<std::uint32_t>(ring_.size() - 1)) {
  for (std::int64_t i = 1; i < num_blocks; ++i) push_back(BlockId{static_cast<std::int32_t>(i)});
}

BlockId FreeQueue::pop_front() {
  LS_CHECK(size_ > 0, "no block is free");
  BlockId block;
  do {
    block = ring_[front_++ & mask_];
  } while (block == kNullBlock);
  --size_;
  return block;
}

void FreeQueue::push_back(BlockId block) {
  if (is_full()) compact();
  put(end_++, block);
  ++size_;
}

void FreeQueue::push_front(BlockId block) {
  if (is_full()) compact();
  put(--front_, block);
  ++size_;
}

void FreeQueue::remove(BlockId block) {
  BlockId& place = ring_[place_[block] & mask_];
  LS_CHECK(place == block, "block {} is not in the free queue", index_of(block));
  place = kNullBlock;
  --size_;
}

void FreeQueue::compact() {
  std::uint32_t end = front_;
  for (std::uint32_t place = front_; place != end_; ++place)
    if (const BlockId block = ring_[place & mask_]; block != kNullBlock) put(end++, block);
  end_ = end;
}

std::vector<BlockId> FreeQueue::in_order() const {
  std::vector<BlockId> blocks;
  blocks.reserve(size_);
  for (std::uint32_t place = front_; place != end_; ++place)
    if (const BlockId block = ring_[place & mask_]; block != kNullBlock) blocks.push_back(block);
  LS_CHECK(std::ssize(blocks) == size_, "{} blocks in a free queue of {}", blocks.size(), size_);
  return blocks;
}

}  // namespace lockstep
