// The rows that a hot region of HiSparse holds: rule (25) of sim/protocol/backend.h. A region's
// slots are in the order of their last use, at first by number.
//
// Invariants
// (1) A read position that is in the region is used in its slot.
// (2) Every other position takes the first slot of the order that the read does not use.
// (3) Afterwards the used slots follow all others, in the order of the read.
//
// A function of the reads only: an indexer chooses which rows are read.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

namespace lockstep {

class HotRegions {
 public:
  struct Swap {
    std::int32_t position = 0;  // that is brought in
    std::int32_t slot = 0;      // where it lies from now on
    bool operator==(const Swap&) const = default;
  };

  // The region of a row of the batch is empty again.
  void clear(std::int32_t row) { regions_.erase(row); }
  // REQUIRES: positions are distinct, and no more than num_slots, which stays the same while the
  // region is not cleared.
  std::vector<Swap> read(std::int32_t row, std::int64_t num_slots,
                         std::span<const std::int32_t> positions);

 private:
  struct Region {
    std::vector<std::int32_t> order;             // slots, least recently used first
    std::vector<std::int32_t> positions;         // by slot; -1: none
    std::map<std::int32_t, std::int32_t> slots;  // by position
  };
  std::map<std::int32_t, Region> regions_;  // by row
};

}  // namespace lockstep
