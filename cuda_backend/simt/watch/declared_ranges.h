// What a launch was said to touch: ranges of device memory that it may read and that it may write.
//
// 1. What may be written may be read too.
// 2. Nothing declared (no object) allows everything that bounds allow.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace simt {

class DeclaredRanges {
 public:
  void allow(std::uintptr_t begin, std::uintptr_t end, bool to_write) {
    if (to_write) writes_.push_back({begin, end});
    reads_.push_back({begin, end});
  }
  // To be called after the last allow().
  void merge() {
    merge(reads_);
    merge(writes_);
  }
  bool allows(std::uintptr_t address, std::size_t bytes, bool to_write) const {
    const std::vector<Range>& ranges = to_write ? writes_ : reads_;
    const auto after = std::upper_bound(ranges.begin(), ranges.end(), Range{address, UINTPTR_MAX});
    return after != ranges.begin() && address + bytes <= std::prev(after)->second;
  }

 private:
  using Range = std::pair<std::uintptr_t, std::uintptr_t>;  // begin, end

  static void merge(std::vector<Range>& ranges) {
    std::sort(ranges.begin(), ranges.end());
    std::size_t kept = 0;
    for (const Range& range : ranges) {
      if (kept != 0 && range.first <= ranges[kept - 1].second) {
        ranges[kept - 1].second = std::max(ranges[kept - 1].second, range.second);
      } else {
        ranges[kept++] = range;
      }
    }
    ranges.resize(kept);
  }

  std::vector<Range> reads_, writes_;
};

}  // namespace simt
