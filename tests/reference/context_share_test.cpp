// The ranks of context parallelism divide a request's tokens among them.
#include "reference/plan/rank_plan.h"

#include <gtest/gtest.h>

#include <vector>

namespace lockstep {
namespace {

TEST(ContextShare, EveryTokenIsKeptByOneRankInOrderAndWithoutGaps) {
  for (const std::int32_t num_ranks : {1, 2, 3, 4, 8})
    for (const std::int32_t interleave : {1, 2, 16}) {
      std::vector<std::int64_t> kept(static_cast<std::size_t>(num_ranks));
      for (std::int64_t position = 0; position < 300; ++position) {
        std::int32_t keepers = 0;
        for (std::int32_t rank = 0; rank < num_ranks; ++rank) {
          const ContextRank at{num_ranks, rank, interleave};
          std::int64_t& count = kept[static_cast<std::size_t>(rank)];
          EXPECT_EQ(num_kept(at, position), count);
          if (!keeps(at, position)) continue;
          ++keepers;
          ++count;
        }
        EXPECT_EQ(keepers, 1) << "position " << position << " of " << num_ranks << " ranks";
      }
    }
}

TEST(ContextShare, RunsOfTheInterleaveGoToTheRanksInTurn) {
  const ContextRank second{2, 1, 4};
  EXPECT_FALSE(keeps(second, 3));
  EXPECT_TRUE(keeps(second, 4));
  EXPECT_TRUE(keeps(second, 7));
  EXPECT_FALSE(keeps(second, 8));
  EXPECT_EQ(num_kept(second, 13), 5);
}

TEST(ContextShare, PrefillRanksDivideBlocksInOneReleaseOnly) {
  EngineConfig engine;
  engine.dcp = 2;
  engine.pcp = 3;
  KVCacheSpec states;
  states.kind = CacheKind::mamba;
  engine.engine = "vllm-0.22.1";
  EXPECT_EQ(num_context_ranks(engine, {}), 6);
  engine.engine = "vllm-0.33.0";
  EXPECT_EQ(num_context_ranks(engine, {}), 2);
  EXPECT_EQ(num_context_ranks(engine, states), 1);
}

}  // namespace
}  // namespace lockstep
