// Which deadlocks are cycles, and which waits end by themselves or never.
#include "sim/engine/wait_graph.h"

#include <gtest/gtest.h>

namespace lockstep {
namespace {

WaitingRequest wants(std::string name, std::int64_t missing, std::int64_t held = 0) {
  return {.name = std::move(name),
          .blocks_held = held,
          .blocks_missing = missing,
          .held_since = held > 0 ? 3 : -1,
          .is_loading = false};
}
WaitingRequest loads(std::string name, std::int64_t held) {
  return {.name = std::move(name),
          .blocks_held = held,
          .blocks_missing = 0,
          .held_since = 3,
          .is_loading = true};
}
Standstill of_ten_blocks(std::int64_t free, std::vector<WaitingRequest> queue) {
  return {.queue = std::move(queue),
          .blocks_held_by_finished = 0,
          .free_blocks = free,
          .total_blocks = 10};
}

TEST(WaitGraph, OneThatDoesNotFitAndAHolderBehindItAreACircle) {
  const auto cycle = find_wait_cycle(of_ten_blocks(4, {wants("a", 6), wants("b", 1, 6)}));
  ASSERT_TRUE(cycle);
  EXPECT_EQ(cycle->requests, (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(cycle->text,
            "a waits for 6 blocks more, and 4 of 10 are free; b (6 blocks, held since step 3) "
            "waits after it in the queue: none of them can continue");
}

TEST(WaitGraph, ThoseThatHoldNothingAreNotInTheCircle) {
  const auto cycle = find_wait_cycle(
      of_ten_blocks(4, {wants("a", 6), wants("idle", 1), wants("b", 1, 3), wants("c", 1, 3)}));
  ASSERT_TRUE(cycle);
  EXPECT_EQ(cycle->requests, (std::vector<std::string>{"a", "b", "c"}));
}

TEST(WaitGraph, ALoadBehindTheOneThatDoesNotFitChangesNothingWhenItIsOver) {
  EXPECT_TRUE(find_wait_cycle(of_ten_blocks(4, {wants("a", 6), loads("b", 6)})));
}

TEST(WaitGraph, ALoadBeforeTheOneThatDoesNotFitMayStillGiveItsBlocksBack) {
  EXPECT_FALSE(find_wait_cycle(of_ten_blocks(4, {loads("b", 6), wants("a", 6)})));
}

TEST(WaitGraph, BlocksThatAreBeingSentComeBack) {
  Standstill standstill = of_ten_blocks(2, {wants("a", 4), wants("b", 1, 4)});
  EXPECT_TRUE(find_wait_cycle(standstill));
  standstill.blocks_held_by_finished = 4;
  EXPECT_FALSE(find_wait_cycle(standstill));
}

TEST(WaitGraph, ARequestLargerThanThePoolWaitsForNobody) {
  EXPECT_FALSE(find_wait_cycle(of_ten_blocks(4, {wants("a", 11), wants("b", 1, 6)})));
}

TEST(WaitGraph, ASecondObstacleBehindOneThatFitsIsFound) {
  const auto cycle =
      find_wait_cycle(of_ten_blocks(4, {wants("fits", 2), wants("a", 6), wants("b", 1, 6)}));
  ASSERT_TRUE(cycle);
  EXPECT_EQ(cycle->requests, (std::vector<std::string>{"a", "b"}));
}

TEST(WaitGraph, AnEmptyQueueHasNoCircle) { EXPECT_FALSE(find_wait_cycle(of_ten_blocks(4, {}))); }

}  // namespace
}  // namespace lockstep
