// Cuts work on blocks into waves. The items of a wave may run at the same time.
//
// Invariants:
// 1. Waves are consecutive runs of the items and cover them all, in order.
// 2. Within a wave no block is written twice, and no block is read by one item and written by
//    another. An item may read and write the same block.
// 3. Running the waves in order gives the result of running the items in order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/check.h"

namespace lockstep::cuda {

// A set of blocks that clear() empties in constant time.
//
// 1. A block is in the set exactly if its epoch is the current one.
class BlockMarks {
 public:
  explicit BlockMarks(std::int64_t num_blocks) : epochs_(num_blocks, 0) {}
  void clear() { ++epoch_; }
  void insert(std::int32_t block) { epochs_[checked(block)] = epoch_; }
  bool contains(std::int32_t block) const { return epochs_[checked(block)] == epoch_; }

 private:
  std::size_t checked(std::int32_t block) const {
    LS_CHECK(block >= 0 && static_cast<std::size_t>(block) < epochs_.size(), "block {} of {}",
             block, epochs_.size());
    return static_cast<std::size_t>(block);
  }

  std::vector<std::uint64_t> epochs_;
  std::uint64_t epoch_ = 1;
};

class BlockWaves {
 public:
  explicit BlockWaves(std::int64_t num_blocks) : read_(num_blocks), written_(num_blocks) {}

  // Calls run(first, count) for each wave of items that write their `block`.
  template <class Item, class Run>
  void for_each_write(std::span<const Item> items, Run run) {
    const auto conflicts = [&](const Item& item) { return written_.contains(item.block); };
    cut(
        items, conflicts, [&](const Item& item) { written_.insert(item.block); }, run);
  }

  // The same for items that read `source`, write `target` and, unless it is block 0, `checkpoint`.
  template <class Item, class Run>
  void for_each_move(std::span<const Item> items, Run run) {
    const auto conflicts = [&](const Item& item) {
      return written_.contains(item.source) || is_in_use(item.target) ||
             (checkpoint_of(item) != 0 && is_in_use(checkpoint_of(item)));
    };
    const auto mark = [&](const Item& item) {
      read_.insert(item.source);
      written_.insert(item.target);
      if (checkpoint_of(item) != 0) written_.insert(checkpoint_of(item));
    };
    cut(items, conflicts, mark, run);
  }

 private:
  template <class Item, class Conflicts, class Mark, class Run>
  void cut(std::span<const Item> items, Conflicts conflicts, Mark mark, Run run) {
    std::size_t first = 0, covered = 0;
    clear();
    for (std::size_t i = 0; i < items.size(); ++i) {
      if (conflicts(items[i])) {
        LS_CHECK(i > first, "item {} conflicts with itself", i);
        run(first, i - first);
        covered += i - first;
        first = i;
        clear();
      }
      mark(items[i]);
    }
    if (first < items.size()) run(first, items.size() - first);
    covered += items.size() - first;
    LS_CHECK(covered == items.size(), "{} of {} items in waves", covered, items.size());
  }
  void clear() {
    read_.clear();
    written_.clear();
  }
  bool is_in_use(std::int32_t block) const {
    return written_.contains(block) || read_.contains(block);
  }
  template <class Item>
  static std::int32_t checkpoint_of(const Item& item) {
    if constexpr (requires { item.checkpoint; }) return item.checkpoint;
    return 0;
  }

  BlockMarks read_, written_;
};

}  // namespace lockstep::cuda
