// The block pool and the prefix cache do, over any sequence of operations, what a page of naive
// code does.
#include "reference/cache/block_pool.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "properties/invariants/naive_block_pool.h"

namespace lockstep {
namespace {

constexpr std::int32_t kNumKeys = 6;

enum class Operation : std::uint8_t { allocate, hit, free, cache, reset };
// A reset forgets all that is cached: it is rare, so that there is something to forget.
constexpr std::array kOperations = {
    Operation::allocate, Operation::hit,  Operation::free,  Operation::cache, Operation::allocate,
    Operation::hit,      Operation::free, Operation::cache, Operation::cache, Operation::reset};
// rapidcheck lets cases grow with their number; a sequence as long as its largest is where the
// classes below are met.
constexpr int kSequenceSize = 200;

struct Seen {
  std::int64_t evictions = 0;
  std::int64_t hits_on_free_blocks = 0;
  std::int64_t shared = 0;
  std::int64_t duplicates = 0;
  std::int64_t resets = 0;
  std::int64_t two_block_pools = 0;
};

// One sequence: every operation is drawn from a word of `script`, so that a shorter script is a
// simpler case.
void run(std::int32_t num_blocks, FreedBlocks freed, const std::vector<std::uint32_t>& script,
         Seen& seen) {
  BlockPool pool(num_blocks, true, freed);
  NaiveBlockPool naive(num_blocks, freed);
  std::vector<BlockId> held;  // one entry a reference
  seen.two_block_pools += num_blocks == 2 ? 1 : 0;
  for (const std::uint32_t word : script) {
    const Operation operation = kOperations[word % kOperations.size()];
    const std::uint32_t pick = word / kOperations.size();
    const BlockKey key{pick % kNumKeys, 7};
    const auto group = static_cast<std::int32_t>(pick / kNumKeys % 2);
    if (operation == Operation::allocate) {
      const auto count = std::min<std::int64_t>(pick % 3, pool.num_free_blocks());
      std::vector<BlockId> got;
      pool.take_counters();
      pool.get_new_blocks(count, got);
      seen.evictions += pool.take_counters().evicted;
      RC_ASSERT(got == naive.get_new_blocks(count));
      held.insert(held.end(), got.begin(), got.end());
    } else if (operation == Operation::hit) {
      const BlockId hit = pool.cache().find(key, group);
      RC_ASSERT(hit == naive.find(key, group));
      if (hit == kNullBlock) continue;
      seen.hits_on_free_blocks += pool.is_evictable(hit) ? 1 : 0;
      seen.shared += pool.ref_cnt(hit) > 0 ? 1 : 0;
      pool.touch({&hit, 1});
      naive.touch(hit);
      held.push_back(hit);
    } else if (operation == Operation::free && !held.empty()) {
      // The last few, tail first, as a request frees them; a null entry among them.
      const std::size_t count = std::min<std::size_t>(1 + pick % 3, held.size());
      std::vector<BlockId> freed_now(held.rbegin(),
                                     held.rbegin() + static_cast<std::ptrdiff_t>(count));
      freed_now.insert(freed_now.begin() + 1, kNullBlock);
      held.resize(held.size() - count);
      pool.free_blocks(freed_now);
      naive.free_blocks(freed_now);
    } else if (operation == Operation::cache && !held.empty()) {
      const BlockId block = held[pick % held.size()];
      if (naive.is_cached(block)) continue;
      seen.duplicates += naive.find(key, group) != kNullBlock ? 1 : 0;
      pool.cache_block(block, key, group);
      naive.cache_block(block, key, group);
    } else if (operation == Operation::reset) {
      const bool reset = pool.reset_prefix_cache();
      RC_ASSERT(reset == naive.reset_prefix_cache());
      seen.resets += reset ? 1 : 0;
    }
    RC_ASSERT(pool.num_free_blocks() == std::ssize(naive.free_queue()));
    for (std::int32_t i = 1; i < num_blocks; ++i) {
      RC_ASSERT(pool.ref_cnt(BlockId{i}) == naive.ref_cnt(BlockId{i}));
      RC_ASSERT(pool.cache().contains(BlockId{i}) == naive.is_cached(BlockId{i}));
    }
    for (std::uint32_t k = 0; k < kNumKeys; ++k)
      for (std::int32_t g = 0; g < 2; ++g)
        RC_ASSERT(pool.cache().find({k, 7}, g) == naive.find({k, 7}, g));
  }
}

class BlockPoolProperty : public testing::TestWithParam<FreedBlocks> {};

TEST_P(BlockPoolProperty, does_what_the_naive_pool_does) {
  Seen seen;
  const bool holds = rc::check("pool and naive pool agree after every operation", [&] {
    const auto num_blocks = *rc::gen::inRange(2, 9);
    const auto script = *rc::gen::resize(
        kSequenceSize,
        rc::gen::container<std::vector<std::uint32_t>>(rc::gen::inRange<std::uint32_t>(0, 5000)));
    run(num_blocks, GetParam(), script, seen);
  });
  EXPECT_TRUE(holds);
  // What was generated is counted: a run that never met these would prove little.
  EXPECT_GT(seen.evictions, 0);
  EXPECT_GT(seen.hits_on_free_blocks, 0);
  EXPECT_GT(seen.shared, 0);
  EXPECT_GT(seen.duplicates, 0);
  EXPECT_GT(seen.resets, 0);
  EXPECT_GT(seen.two_block_pools, 0);
}

INSTANTIATE_TEST_SUITE_P(Orders, BlockPoolProperty,
                         testing::Values(FreedBlocks::append, FreedBlocks::unhashed_first),
                         [](const auto& order) {
                           return order.param == FreedBlocks::append ? "append" : "unhashed_first";
                         });

}  // namespace
}  // namespace lockstep
