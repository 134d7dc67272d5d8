// Cache events say what the prefix cache did, in order, with the engine's own hashes.
#include "reference/cache/cache_events.h"

#include <gtest/gtest.h>

#include "reference/schedule/scheduler.h"

namespace lockstep {
namespace {

class CacheEvents : public testing::TestWithParam<std::string> {
 protected:
  Scheduler make(std::int64_t num_blocks, std::int32_t block_size = 4) {
    EngineConfig config;
    config.engine = GetParam();
    config.max_num_batched_tokens = 64;
    config.max_model_len = 64;
    config.block_size = block_size;
    config.hash_algorithm = HashAlgorithm::sha256_cbor;
    std::vector<KVCacheGroupSpec> groups(1);
    groups[0].spec.block_size = block_size;
    auto scheduler = Scheduler::create(config, groups, num_blocks);
    EXPECT_TRUE(scheduler) << scheduler.error().message;
    return std::move(*scheduler);
  }
  static RequestSpec request(const std::string& name, std::uint64_t seed, std::uint32_t size,
                             const std::string& salt = {}) {
    RequestSpec spec;
    spec.name = name;
    spec.prompt.append({TokenRun::Kind::seeded, seed, 0, size});
    spec.max_tokens = 1;
    spec.cache_salt = salt;
    return spec;
  }
  // One step in which every scheduled request samples token 7.
  static void step(Scheduler& scheduler) {
    ModelOutput output;
    for (std::size_t i = 0; i < scheduler.schedule().scheduled.size(); ++i) {
      output.tokens.push_back(7);
      output.token_ends.push_back(static_cast<std::uint32_t>(output.tokens.size()));
    }
    if (!output.token_ends.empty()) scheduler.update_from_output(output);
  }
  std::vector<ExternalBlockHash> chain(std::uint64_t seed, std::uint32_t size,
                                       std::int32_t block_size, const std::string& salt = {}) {
    Prompt prompt;
    prompt.append({TokenRun::Kind::seeded, seed, 0, size});
    BlockHashChain hashes;
    hashes.extend({.algorithm = HashAlgorithm::sha256_cbor,
                   .hash_block_size = block_size,
                   .num_lookahead_tokens = 0,
                   .tags_extra_keys = GetParam() == "vllm-0.33.0"},
                  TokenSequence(prompt), salt);
    return hashes.external();
  }
};

TEST_P(CacheEvents, StoredNamesHashesParentTokensAndSalt) {
  Scheduler scheduler = make(8);
  ASSERT_TRUE(scheduler.add_request(request("a", 5, 9, "pepper")));
  step(scheduler);
  const std::vector<CacheEvent> events = scheduler.take_cache_events();
  const auto hashes = chain(5, 9, 4, "pepper");
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].kind, CacheEvent::Kind::stored);
  EXPECT_EQ(events[0].block_hashes, hashes);
  EXPECT_FALSE(events[0].parent);
  EXPECT_EQ(events[0].block_size, 4);
  ASSERT_EQ(events[0].token_ids.size(), 8u);
  for (std::uint32_t i = 0; i < 8; ++i) EXPECT_EQ(events[0].token_ids[i], seeded_token(5, i));
  EXPECT_EQ(events[0].extra_keys,
            (std::vector<std::optional<std::string>>{"pepper", std::nullopt}));
}

TEST_P(CacheEvents, BlocksStoredAfterAHitNameTheHitBlockAsParent) {
  Scheduler scheduler = make(16);
  ASSERT_TRUE(scheduler.add_request(request("a", 5, 5)));
  step(scheduler);
  scheduler.take_cache_events();
  ASSERT_TRUE(scheduler.add_request(request("b", 5, 9)));
  step(scheduler);
  const std::vector<CacheEvent> events = scheduler.take_cache_events();
  const auto hashes = chain(5, 9, 4);
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].parent, hashes[0]);
  EXPECT_EQ(events[0].block_hashes, (std::vector<ExternalBlockHash>{hashes[1]}));
  EXPECT_EQ(events[0].token_ids.size(), 4u);
}

TEST_P(CacheEvents, ABlockIsRemovedBeforeAnythingIsStoredInIt) {
  Scheduler scheduler = make(3);  // two blocks to use
  ASSERT_TRUE(scheduler.add_request(request("a", 5, 8)));
  step(scheduler);
  scheduler.take_cache_events();
  ASSERT_TRUE(scheduler.add_request(request("b", 6, 8)));
  step(scheduler);
  const std::vector<CacheEvent> events = scheduler.take_cache_events();
  auto hashes = chain(5, 8, 4);
  ASSERT_EQ(events.size(), 3u);
  EXPECT_EQ(events[0].kind, CacheEvent::Kind::removed);
  EXPECT_EQ(events[1].kind, CacheEvent::Kind::removed);
  EXPECT_EQ(events[2].kind, CacheEvent::Kind::stored);
  // The tail of the older chain goes first.
  EXPECT_EQ(events[0].block_hashes[0], hashes[1]);
  EXPECT_EQ(events[1].block_hashes[0], hashes[0]);
}

TEST_P(CacheEvents, AResetClearsEverythingAndNothingIsRemovedLater) {
  Scheduler scheduler = make(3);
  ASSERT_TRUE(scheduler.add_request(request("a", 5, 8)));
  step(scheduler);
  scheduler.take_cache_events();
  ASSERT_TRUE(scheduler.reset_prefix_cache());
  ASSERT_TRUE(scheduler.add_request(request("b", 6, 8)));
  step(scheduler);
  const std::vector<CacheEvent> events = scheduler.take_cache_events();
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[0].kind, CacheEvent::Kind::cleared);
  EXPECT_EQ(events[1].kind, CacheEvent::Kind::stored);
}

TEST_P(CacheEvents, StoredAndRemovedHashesAreAsManyAsAreCounted) {
  Scheduler scheduler = make(9);
  std::int64_t stored = 0;
  std::int64_t removed = 0;
  CacheCounters counted;
  for (std::uint32_t i = 0; i < 60; ++i) {
    ASSERT_TRUE(scheduler.add_request(request("r" + std::to_string(i), i % 7, 5 + i % 11)));
    step(scheduler);
    const CacheCounters counters = scheduler.take_cache_counters();
    counted.stored += counters.stored;
    counted.evicted += counters.evicted;
    for (const CacheEvent& event : scheduler.take_cache_events()) {
      if (event.kind == CacheEvent::Kind::stored) stored += std::ssize(event.block_hashes);
      if (event.kind == CacheEvent::Kind::removed) removed += std::ssize(event.block_hashes);
    }
  }
  EXPECT_EQ(stored, counted.stored);
  EXPECT_EQ(removed, counted.evicted);
  EXPECT_GT(removed, 20);
}

INSTANTIATE_TEST_SUITE_P(Engines, CacheEvents, testing::Values("vllm-0.22.1", "vllm-0.33.0"),
                         [](const auto& engine) {
                           return engine.param == "vllm-0.22.1" ? "vllm_0_22_1" : "vllm_0_33_0";
                         });

// A hash that moved to another block is removed with that block, and reported then.
TEST(CacheEventLog, AHashThatMovesIsRemovedWithTheBlockItMovedTo) {
  CacheEventLog log;
  log.names(BlockId{1}, 0, {1});
  log.names(BlockId{2}, 1, {2});
  log.moved(BlockId{1}, BlockId{2});
  log.moved(BlockId{2}, BlockId{2});
  log.removed(BlockId{1});
  EXPECT_TRUE(log.take().empty());
  log.removed(BlockId{2});
  const std::vector<CacheEvent> events = log.take();
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[0].block_hashes, (std::vector<ExternalBlockHash>{{2}}));
  EXPECT_EQ(events[1].block_hashes, (std::vector<ExternalBlockHash>{{1}}));
  EXPECT_EQ(events[1].group, 0);
}

}  // namespace
}  // namespace lockstep
