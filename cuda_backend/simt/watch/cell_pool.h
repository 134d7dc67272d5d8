// Runs of shadow cells for granules that are split: 4 of 4 bytes, 8 of 2 or 16 of 1.
//
// A run is named by a number that fits a word; runs are recycled, and never move.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "cuda_backend/simt/watch/stamp.h"

namespace simt {

struct Cell {
  Stamp written = 0;
  Stamp read = 0;
  bool operator==(const Cell&) const = default;
};

class CellPool {
 public:
  struct Run {
    Cell* cells;
    unsigned log2_width;  // of what one cell stands for, in bytes: 0, 1 or 2
  };

  // Cells of unspecified content.
  std::uint64_t take(unsigned log2_width) {
    Width& pool = widths_[log2_width];
    if (!pool.free.empty()) {
      const std::uint64_t name = pool.free.back();
      pool.free.pop_back();
      return name;
    }
    if (pool.used % kChunkRuns == 0)
      pool.chunks.push_back(std::make_unique<Cell[]>(kChunkRuns * (16u >> log2_width)));
    return (pool.used++ << 2) | log2_width;
  }
  void give_back(std::uint64_t name) { widths_[name & 3].free.push_back(name); }
  Run run(std::uint64_t name) const {
    const unsigned log2_width = name & 3;
    const std::uint64_t index = name >> 2;
    return {widths_[log2_width].chunks[index / kChunkRuns].get() +
                index % kChunkRuns * (16u >> log2_width),
            log2_width};
  }

 private:
  static constexpr std::size_t kChunkRuns = 4096;
  struct Width {
    std::vector<std::unique_ptr<Cell[]>> chunks;
    std::vector<std::uint64_t> free;
    std::uint64_t used = 0;
  };
  std::array<Width, 3> widths_;
};

}  // namespace simt
