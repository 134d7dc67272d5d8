// The names of the numbers in stamps: every launch and host copy, in order.
//
// Invariants:
// 1. Numbers start at 1 and grow by one per launch or copy; begin_again() restarts them at 2.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cuda_backend/simt/report.h"
#include "cuda_backend/simt/stamp.h"

namespace simt {

// The declared ranges of a launch: device memory that it may read and that it may write.
//
// 1. A range that may be written may also be read.
// 2. After merge() the ranges of each list are sorted and do not touch.
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
  using Range = std::pair<std::uintptr_t, std::uintptr_t>;  // begin, end
  // The last declared range that begins at the address or before; empty if none does.
  Range range_of(std::uintptr_t address, bool to_write) const {
    const std::vector<Range>& ranges = to_write ? writes_ : reads_;
    const auto after = std::upper_bound(ranges.begin(), ranges.end(), Range{address, UINTPTR_MAX});
    return after == ranges.begin() ? Range{} : *std::prev(after);
  }

 private:
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

class LaunchLog {
 public:
  // Numbers the next launch or host copy, from 1. Requires !full().
  std::uint32_t begin_launch(std::string_view kernel, uint3 grid) {
    return begin(kernel, false, grid);
  }
  std::uint32_t begin_host(std::string_view operation) { return begin(operation, true, {1, 1, 1}); }
  bool full() const { return entries_.size() >= kMaxLaunch; }
  // Numbers begin again at 2; 1 stands for everything so far. Returns the stamp of that.
  Stamp begin_again();

  // Records the CTA of a tag that is not a linear index (stamp.h, rule 2).
  void keep_tag(std::uint32_t launch, std::uint32_t tag, std::uint32_t cta_linear) {
    extra_tags_[(std::uint64_t{launch} << 32) | tag] = cta_linear;
  }

  // The number that reports show: it never begins again.
  std::uint64_t absolute(std::uint32_t launch) const { return forgotten_ + launch; }
  Party party_of(Stamp stamp) const;
  Party party_of(std::uint32_t launch, std::uint32_t cta_linear, unsigned thread,
                 unsigned epoch) const;

 private:
  struct Entry {
    std::uint32_t name;  // index into names_
    bool is_host;
    std::uint32_t grid_x, grid_y;
  };
  std::uint32_t begin(std::string_view name, bool is_host, uint3 grid);
  std::uint32_t name_index(std::string_view name);

  std::vector<Entry> entries_;  // number - 1
  std::vector<std::string> names_;
  std::unordered_map<std::string, std::uint32_t> name_indices_;
  std::uint32_t last_name_ = 0;
  std::map<std::uint64_t, std::uint32_t> extra_tags_;  // launch << 32 | tag to CTA
  std::uint64_t forgotten_ = 0;
};

}  // namespace simt
