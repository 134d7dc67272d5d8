// Where a prefill exports a state from inside its last chunk, and the effect.
#include "reference/cache/group_manager.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "tests/reference/engine.h"

namespace lockstep {
namespace {

TEST(PrefillCheckpoint, LiesBeforeTheTokenWhoseLogitsAreNeeded) {
  EXPECT_EQ(prefill_checkpoint_position(70, 16, false, 0), 64);
  EXPECT_EQ(prefill_checkpoint_position(65, 16, false, 0), 64);
  EXPECT_EQ(prefill_checkpoint_position(64, 16, false, 0), 48);
  EXPECT_EQ(prefill_checkpoint_position(66, 16, false, 3), 48);  // a hash covers three tokens more
  EXPECT_EQ(prefill_checkpoint_position(64, 16, true, 0), 48);
  EXPECT_EQ(prefill_checkpoint_position(1, 16, false, 0), 0);
  EXPECT_EQ(prefill_checkpoint_position(0, 16, false, 3), 0);
}

CheckpointQuery chunk(std::int32_t begin, std::int32_t end, std::int32_t position) {
  return {.begin = begin,
          .end = end,
          .position = position,
          .hash_block_size = 16,
          .state_block_size = 16,
          .alignment = 1};
}

TEST(PrefillCheckpoint, IsExportedIntoTheEntryBeforeTheLast) {
  EXPECT_TRUE(exports_checkpoint(chunk(0, 70, 64)));
  EXPECT_TRUE(exports_checkpoint(chunk(32, 70, 64)));
  EXPECT_FALSE(exports_checkpoint(chunk(8, 70, 64)));   // does not begin on a hash block
  EXPECT_FALSE(exports_checkpoint(chunk(64, 70, 64)));  // begins there
  EXPECT_FALSE(exports_checkpoint(chunk(0, 64, 64)));   // ends there
  EXPECT_FALSE(exports_checkpoint(chunk(0, 12, 8)));    // no entry before the last
  EXPECT_FALSE(exports_checkpoint(chunk(48, 60, 56)));  // the entry holds the chunk's first state
}

TEST(PrefillCheckpoint, LiesOnTheGridOfTheKernel) {
  CheckpointQuery query = chunk(16, 70, 64);
  query.alignment = 48;
  EXPECT_TRUE(exports_checkpoint(query));
  query.alignment = 32;
  EXPECT_FALSE(exports_checkpoint(query));
  query.alignment = 0;
  EXPECT_FALSE(exports_checkpoint(query));
}

// A prompt of 70 tokens is one chunk where its state at 64 is exported, and two where it is not.
TEST(PrefillCheckpoint, SparesAPrefillTheCutAtTheStateThatAResendHits) {
  for (const std::int64_t alignment : {1, 48, 0}) {
    EngineConfig config;
    config.max_num_batched_tokens = 256;
    config.mamba_cache_mode = MambaCacheMode::align;
    config.prefix_cache_retention_interval = 0;
    KVCacheGroupSpec group = states(16, MambaCacheMode::align);
    group.spec.num_prefill_checkpoint_blocks = 1;
    group.spec.prefill_checkpoint_alignment = alignment;
    Engine engine(config, {full(16), group}, 40);
    const RequestId a = engine.add("a", prompt_of(1, 70), 2);
    EXPECT_EQ(engine.step().scheduled.at(0).num_tokens, alignment == 1 ? 70 : 64);
    if (alignment == 1) {
      const auto table = engine.scheduler().block_table(a, 1);
      EXPECT_EQ(std::ranges::count(table, kNullBlock),
                3);  // of five; the state at 64 is the fourth
      EXPECT_TRUE(engine.scheduler().is_cached(table[3]));
    }
    engine.finish_all();
    engine.add("b", prompt_of(1, 70), 1);
    EXPECT_EQ(engine.step().scheduled.at(0).computed, 64);
  }
}

}  // namespace
}  // namespace lockstep
