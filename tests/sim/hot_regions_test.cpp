// Hot regions of HiSparse reuse the least recently used slots, and never one that the same read
// uses.
#include "sim/step/page_planner.h"

#include <gtest/gtest.h>

namespace lockstep {
namespace {

using Swaps = std::vector<HotRegions::Swap>;
using Positions = std::vector<std::int32_t>;

TEST(HotRegions, RowsTakeTheSlotsUsedLongestAgo) {
  HotRegions regions;
  EXPECT_EQ(regions.read(0, 4, Positions{10, 20}), (Swaps{{10, 0}, {20, 1}}));
  EXPECT_EQ(regions.read(0, 4, Positions{20, 30}), (Swaps{{30, 2}}));
  // Slot 3 was never used, then 0 (of 10), then 1 and 2.
  EXPECT_EQ(regions.read(0, 4, Positions{40, 50}), (Swaps{{40, 3}, {50, 0}}));
  EXPECT_EQ(regions.read(0, 4, Positions{10}), (Swaps{{10, 1}}));
}

TEST(HotRegions, ASlotThatTheReadUsesIsNotHandedOut) {
  HotRegions regions;
  regions.read(0, 3, Positions{1, 2, 3});
  // 1 was used longest ago, and is read again.
  EXPECT_EQ(regions.read(0, 3, Positions{4, 1}), (Swaps{{4, 1}}));
  EXPECT_EQ(regions.read(0, 3, Positions{3}), Swaps{});
}

TEST(HotRegions, EachRowHasARegionAndForgetsItWhenCleared) {
  HotRegions regions;
  regions.read(0, 2, Positions{7});
  EXPECT_EQ(regions.read(1, 2, Positions{7}), (Swaps{{7, 0}}));
  regions.clear(0);
  EXPECT_EQ(regions.read(0, 2, Positions{8, 7}), (Swaps{{8, 0}, {7, 1}}));
  EXPECT_EQ(regions.read(1, 2, Positions{7}), Swaps{});
}

}  // namespace
}  // namespace lockstep
