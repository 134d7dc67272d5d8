// Work on blocks, cut into waves that may run at once: within a wave no block is written twice, and
// none is read and written by different items. Waves in order give what the items in order give.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace lockstep::cuda {

// A set of blocks that is emptied at no cost.
class BlockMarks {
 public:
  explicit BlockMarks(std::int64_t num_blocks) : epochs_(num_blocks, 0) {}
  void clear() { ++epoch_; }
  void insert(std::int32_t block) { epochs_[block] = epoch_; }
  bool contains(std::int32_t block) const { return epochs_[block] == epoch_; }

 private:
  std::vector<std::uint64_t> epochs_;
  std::uint64_t epoch_ = 1;
};

class BlockWaves {
 public:
  explicit BlockWaves(std::int64_t num_blocks) : read_(num_blocks), written_(num_blocks) {}

  // Items write their `block`. Calls run(first, count) for each wave.
  template <class Item, class Run>
  void for_each_write(std::span<const Item> items, Run run) {
    const auto conflicts = [&](const Item& item) { return written_.contains(item.block); };
    cut(
        items, conflicts, [&](const Item& item) { written_.insert(item.block); }, run);
  }

  // Items read `source` and write `target`, and `checkpoint` where they have one (not block 0); an
  // item whose blocks are one is no conflict in itself.
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
    std::size_t first = 0;
    clear();
    for (std::size_t i = 0; i < items.size(); ++i) {
      if (conflicts(items[i])) {
        run(first, i - first);
        first = i;
        clear();
      }
      mark(items[i]);
    }
    if (first < items.size()) run(first, items.size() - first);
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
