// What single managers and the pool do, by hand: the places where the profiles part.
#include "reference/cache/group_manager.h"

#include <gtest/gtest.h>

#include "tests/reference/engine.h"

namespace lockstep {
namespace {

constexpr const char* kOld = "vllm-0.22.1";
constexpr const char* kNew = "vllm-0.33.0";
constexpr BlockSizes kSizes{16, 16};

EngineConfig config_of(std::string engine) {
  EngineConfig config;
  config.engine = std::move(engine);
  config.max_num_batched_tokens = 64;
  return config;
}

// A request whose table in group 0 is `blocks`, each of them taken from the pool or null.
Request request_with(BlockPool& pool, const std::vector<bool>& held,
                     std::uint32_t num_tokens = 160) {
  RequestSpec spec;
  spec.name = "a";
  spec.prompt = prompt_of(1, num_tokens);
  Request request(std::move(spec), 1);
  request.hashes.extend({HashAlgorithm::content, 16}, request.tokens, "");
  for (const bool is_held : held) {
    if (is_held)
      pool.get_new_blocks(1, request.groups[0].blocks);
    else
      request.groups[0].blocks.push_back(kNullBlock);
  }
  return request;
}

// The next `count` blocks that the pool allocates.
std::vector<std::int32_t> next_blocks(BlockPool& pool, std::int64_t count) {
  std::vector<BlockId> blocks;
  pool.get_new_blocks(count, blocks);
  return ids(blocks);
}

TEST(BlockPoolDeathTest, ABlockOfAnotherPoolStopsTheProgram) {
  BlockPool pool(4, true, FreedBlocks{});
  const std::vector<BlockId> strangers = {BlockId{4}};
  EXPECT_FALSE(pool.is_cached(BlockId{3}));
  EXPECT_DEATH(pool.is_cached(BlockId{4}), "block 4 in a pool of 4");
  EXPECT_DEATH(pool.ref_cnt(BlockId{-1}), "block -1 in a pool of 4");
  EXPECT_DEATH(pool.touch(strangers), "block 4 in a pool of 4");
  EXPECT_DEATH(pool.free_blocks(strangers), "block 4 in a pool of 4");
  EXPECT_DEATH(pool.evict_blocks(strangers), "block 4 in a pool of 4");
}

TEST(BlockPool, PutsBlocksWithoutContentToTheFrontInTheOrderFreed) {
  BlockPool pool(8, true, FreedBlocks::unhashed_first);
  std::vector<BlockId> blocks;
  pool.get_new_blocks(4, blocks);  // 1 to 4
  pool.cache_block(blocks[1], {1, 1}, 0);
  pool.free_blocks_reversed(blocks);
  EXPECT_EQ(next_blocks(pool, 7), (std::vector{4, 3, 1, 5, 6, 7, 2}));
}

TEST(BlockPool, AppendsAllBlocksInTheOrderFreed) {
  BlockPool pool(8, true, FreedBlocks::append);
  std::vector<BlockId> blocks;
  pool.get_new_blocks(4, blocks);
  pool.cache_block(blocks[1], {1, 1}, 0);
  pool.free_blocks_reversed(blocks);
  EXPECT_EQ(next_blocks(pool, 7), (std::vector{5, 6, 7, 4, 3, 2, 1}));
}

TEST(BlockPool, CountsKeysOfPartsWithTheBlockThatTheyGoWith) {
  BlockPool pool(3, true, FreedBlocks::unhashed_first);
  std::vector<BlockId> blocks;
  pool.get_new_blocks(1, blocks);
  pool.cache_block(blocks[0], {1, 1}, 0, 16);
  EXPECT_TRUE(pool.cache_part_of_block(blocks[0], {2, 2}, 0, 8));
  EXPECT_FALSE(pool.cache_part_of_block(blocks[0], {2, 2}, 0, 8));  // known already
  EXPECT_EQ(pool.cache().find({2, 2}, 0), blocks[0]);
  EXPECT_EQ(pool.take_counters().stored, 2);
  pool.free_blocks(blocks);
  next_blocks(pool, 2);
  EXPECT_EQ(pool.take_counters().evicted, 2);
}

TEST(BlockPool, AWholeBlockTakesThePlaceOfItsPart) {
  BlockPool pool(3, true, FreedBlocks::unhashed_first);
  std::vector<BlockId> blocks;
  pool.get_new_blocks(1, blocks);
  pool.cache_part_of_block(blocks[0], {2, 2}, 0, 8);
  pool.cache_block(blocks[0], {1, 1}, 0, 16);
  const CacheCounters counters = pool.take_counters();
  EXPECT_EQ(counters.stored, 2);
  EXPECT_EQ(counters.evicted, 1);
  EXPECT_EQ(pool.cache().find({2, 2}, 0), kNullBlock);
}

TEST(BlockPool, ALongerPartTakesThePlaceOfAShorterOneAndNotTheReverse) {
  BlockPool pool(3, true, FreedBlocks::unhashed_first);
  std::vector<BlockId> blocks;
  pool.get_new_blocks(2, blocks);
  pool.cache_part_of_block(blocks[0], {1, 1}, 0, 8);
  pool.cache_part_of_block(blocks[0], {2, 2}, 0, 12);
  EXPECT_EQ(pool.cache().find({1, 1}, 0), kNullBlock);
  pool.cache_part_of_block(blocks[0], {1, 1}, 0, 8);
  EXPECT_EQ(pool.cache().find({1, 1}, 0), blocks[0]);
  // All keys move at once, and those of a block that is overwritten go.
  pool.move_keys(blocks[0], blocks[1]);
  EXPECT_EQ(pool.cache().find({1, 1}, 0), blocks[1]);
  EXPECT_EQ(pool.cache().find({2, 2}, 0), blocks[1]);
  EXPECT_FALSE(pool.is_cached(blocks[0]));
  pool.cache_part_of_block(blocks[1], {3, 3}, 0, 4, true);
  EXPECT_EQ(pool.cache().find({1, 1}, 0), kNullBlock);
  EXPECT_EQ(pool.cache().find({2, 2}, 0), kNullBlock);
  EXPECT_EQ(pool.cache().find({3, 3}, 0), blocks[1]);
}

TEST(MambaManager, FindsRetiredStatesBeyondANullEntryIn0330Only) {
  for (const char* engine : {kOld, kNew}) {
    BlockPool pool(20, true, FreedBlocks::append);
    const auto manager = GroupManager::create(states(16, MambaCacheMode::align).spec, 0,
                                              config_of(engine), kSizes, pool);
    Request request = request_with(pool, {true, false, true, true});  // states at 16, 48 and 64
    manager->remove_skipped_blocks(request, 64);
    // The last token's state stays. 0.22.1 stops at the null entry: block 1 is held to the end.
    EXPECT_EQ(ids(request.groups[0].blocks),
              engine == kOld ? (std::vector{1, 0, 0, 3}) : (std::vector{0, 0, 0, 3}));
  }
}

TEST(MambaManager, CountsDraftsAsRejectedIn0221Only) {
  for (const char* engine : {kOld, kNew}) {
    BlockPool pool(20, true, FreedBlocks::append);
    const auto manager = GroupManager::create(states(16, MambaCacheMode::align, 3).spec, 0,
                                              config_of(engine), kSizes, pool);
    Request request = request_with(pool, {true, true});
    manager->remove_skipped_blocks(request, 18);
    EXPECT_EQ(ids(request.groups[0].blocks),
              engine == kOld ? (std::vector{1, 2}) : (std::vector{0, 2}));
  }
}

TEST(MambaManager, NeedsNoNewBlockWhenRejectedDraftsLeftTooMany) {
  BlockPool pool(20, true, FreedBlocks::append);
  const auto manager = GroupManager::create(states(16, MambaCacheMode::align, 2).spec, 0,
                                            config_of(kNew), kSizes, pool);
  Request request = request_with(pool, {});
  EXPECT_EQ(manager->allocate_new_blocks(request, {.num_tokens_main_model = 17}), 0u);
  EXPECT_EQ(request.groups[0].blocks.size(), 4u);
  EXPECT_EQ(manager->allocate_new_blocks(request, {.num_tokens_main_model = 16}), 4u);
  EXPECT_EQ(request.groups[0].blocks.size(), 4u);
}

TEST(SlidingWindowManager, FreesAWindowRightToLeftInOneCall) {
  BlockPool pool(10, true, FreedBlocks::unhashed_first);
  const auto manager = GroupManager::create(window(16, 17).spec, 0, config_of(kNew), kSizes, pool);
  Request request = request_with(pool, {true, true, true, true});
  manager->remove_skipped_blocks(request, 64);
  EXPECT_EQ(ids(request.groups[0].blocks), (std::vector{0, 0, 0, 4}));
  EXPECT_EQ(next_blocks(pool, 4), (std::vector{3, 2, 1, 5}));
}

// Places of the window blocks of a prompt of 160 tokens that are published.
std::vector<std::int32_t> published(std::string engine, std::int64_t num_tokens,
                                    std::int32_t scheduler_block_size, std::int32_t retention,
                                    std::int32_t shared_prefix_boundary = 0) {
  EngineConfig config = config_of(std::move(engine));
  config.prefix_cache_retention_interval = retention;
  BlockPool pool(20, true, FreedBlocks::append);
  const auto manager = GroupManager::create(window(16, num_tokens).spec, 0, config,
                                            {scheduler_block_size, 16}, pool);
  Request request = request_with(pool, std::vector<bool>(10, true));
  request.shared_prefix_boundary = shared_prefix_boundary;
  manager->cache_blocks(request, 160);
  std::vector<std::int32_t> places;
  for (std::int32_t i = 0; i < 10; ++i)
    if (pool.is_cached(request.groups[0].blocks[static_cast<std::size_t>(i)])) places.push_back(i);
  return places;
}

TEST(SlidingWindowManager, PublishesWhatAHitCanNeed) {
  // Hits end at multiples of 64 tokens and need two blocks of 16.
  EXPECT_EQ(published(kOld, 20, 64, kDenseRetention), (std::vector{2, 3, 6, 7}));
  EXPECT_EQ(published(kNew, 20, 64, kDenseRetention), (std::vector{2, 3, 6, 7}));
  EXPECT_EQ(published(kNew, 20, 16, kDenseRetention).size(), 10u);
}

TEST(SlidingWindowManager, PublishesAWindowOfOneTokenIn0221Only) {
  EXPECT_EQ(published(kOld, 1, 16, kDenseRetention).size(), 10u);
  EXPECT_EQ(published(kNew, 1, 16, kDenseRetention).size(), 0u);
}

TEST(SlidingWindowManager, PublishesEndsOfPromptsAndSharedPrefixesWithRetention) {
  EXPECT_EQ(published(kNew, 20, 16, 0), (std::vector{7, 8}));  // a resend hits 144 of 160 tokens
  EXPECT_EQ(published(kNew, 20, 16, 0, 64), (std::vector{2, 3, 7, 8}));
  EXPECT_EQ(published(kNew, 20, 16, 96), (std::vector{4, 5, 7, 8}));
}

TEST(FullAttentionManager, RegistersThePromptSLastPartOfABlockIn0330) {
  for (const char* engine : {kOld, kNew}) {
    BlockPool pool(20, true, FreedBlocks::append);
    const auto manager = GroupManager::create(full(32).spec, 0, config_of(engine), {32, 16}, pool);
    Request request = request_with(pool, {true, true, true}, 90);
    manager->cache_blocks(request, 90);
    // Two blocks of 32; the prompt's last hashed boundary, 80, lies inside the third.
    EXPECT_EQ(pool.take_counters().stored, engine == kOld ? 2 : 3);
  }
}

}  // namespace
}  // namespace lockstep
