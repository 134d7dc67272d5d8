// The queue of free blocks: blocks join at either end, leave at the front, and may leave from the
// middle.
//
// A ring of positions instead of vLLM's linked list: the next blocks to leave are adjacent in
// memory, so upcoming() can prefetch what their eviction touches.
//
// Invariants
// (1) ring_[place_[b]] is b for every block in the queue. A position that a block has left from the
//     middle holds the null block until the front or compact() passes it.
// (2) The ring has twice the pool's capacity, so compact() drops a pool's worth of empty positions
//     each time: joining is amortized O(1).
//
// Not checked here: that a block joins once. The pool's ref_cnt ensures it.
#pragma once

#include <cstdint>
#include <vector>

#include "base/ids.h"

namespace lockstep {

class FreeQueue {
 public:
  // Blocks 1 .. num_blocks - 1 in this order.
  explicit FreeQueue(std::int64_t num_blocks);

  std::int64_t size() const { return size_; }
  BlockId pop_front();  // REQUIRES: size() > 0
  void push_back(BlockId block);
  void push_front(BlockId block);
  void remove(BlockId block);  // REQUIRES: it is in the queue

  // A block about `distance` pops away, or any other block: a hint.
  BlockId upcoming(std::uint32_t distance) const { return ring_[(front_ + distance) & mask_]; }
  std::vector<BlockId> in_order() const;  // front first

 private:
  void put(std::uint32_t place, BlockId block) {
    ring_[place & mask_] = block;
    place_[block] = place;
  }
  bool is_full() const { return end_ - front_ == ring_.size(); }
  void compact();

  std::vector<BlockId> ring_;
  IdVector<BlockId, std::uint32_t> place_;
  std::uint32_t mask_;
  // Places count on and wrap around at 2^32, which the ring's length divides.
  std::uint32_t front_ = 0;
  std::uint32_t end_ = 0;
  std::int64_t size_ = 0;
};

}  // namespace lockstep
