// A request at rest: allocate_slots would do nothing for it, so it is not asked.
#include <gtest/gtest.h>

#include "base/check.h"
#include "reference/cache/kv_cache_coordinator.h"
#include "tests/reference/engine.h"

namespace lockstep {
namespace {

KVCacheGroupSpec chunked(std::int64_t block_size, std::int64_t chunk) {
  KVCacheGroupSpec group = group_of(CacheKind::chunked_local, block_size);
  group.spec.attention_chunk_size = chunk;
  return group;
}

// One request that decodes, and everything that an allocation could change.
struct Decode {
  Decode(const EngineConfig& config, const std::vector<KVCacheGroupSpec>& groups)
      : sizes(*resolve_block_sizes(config, groups)), cache(config, groups, sizes, 200) {
    RequestSpec spec;
    spec.name = "a";
    spec.prompt = prompt_of(1, 30);
    request = std::make_unique<Request>(std::move(spec), static_cast<int>(groups.size()));
    first_new.resize(groups.size());
  }

  void extend_hashes() {
    request->hashes.extend({HashAlgorithm::content, sizes.hash_block_size}, request->tokens, "");
  }
  bool allocate(std::int32_t num_new, std::int32_t num_lookahead) {
    return cache.allocate_slots(*request, num_new, num_lookahead, nullptr, false, first_new);
  }
  std::vector<std::vector<BlockId>> tables() const {
    std::vector<std::vector<BlockId>> tables;
    for (const GroupBlocks& held : request->groups) tables.push_back(held.blocks);
    return tables;
  }

  BlockSizes sizes;
  KVCacheCoordinator cache;
  std::unique_ptr<Request> request;
  std::vector<std::size_t> first_new;
};

// Decodes 200 tokens; asks also where the request is at rest, and nothing may change. Returns how
// many steps were at rest.
int decode(const char* engine, const std::vector<KVCacheGroupSpec>& groups,
           std::int32_t num_lookahead) {
  EngineConfig config;
  config.engine = engine;
  config.max_model_len = 1'000;
  Decode run(config, groups);
  run.extend_hashes();
  LS_CHECK(run.allocate(30, num_lookahead), "the pool is too small");
  run.request->num_computed_tokens = 30;
  int num_at_rest = 0;
  for (std::int32_t step = 0; step < 200; ++step) {
    run.request->tokens.append(7);
    run.extend_hashes();
    const bool at_rest = run.cache.is_at_rest(*run.request, 1, num_lookahead);
    run.cache.pool().take_counters();
    const auto tables = run.tables();
    const auto queue = run.cache.pool().free_queue();
    LS_CHECK(run.allocate(1, num_lookahead), "the pool is too small");
    if (at_rest) {
      ++num_at_rest;
      EXPECT_EQ(run.tables(), tables) << "step " << step;
      EXPECT_EQ(run.cache.pool().free_queue(), queue) << "step " << step;
      EXPECT_EQ(run.cache.pool().take_counters().stored, 0) << "step " << step;
      for (std::size_t g = 0; g < groups.size(); ++g)
        EXPECT_EQ(run.first_new[g], tables[g].size()) << "step " << step;
    }
    ++run.request->num_computed_tokens;
  }
  return num_at_rest;
}

TEST(TableRest, AllocationChangesNothingInAnyGroupOfARequestAtRest) {
  for (const char* engine : {"vllm-0.22.1", "vllm-0.33.0"})
    for (const std::int32_t num_lookahead : {0, 3}) {
      SCOPED_TRACE(std::string(engine) + ", lookahead " + std::to_string(num_lookahead));
      // Of 16 steps one publishes and one takes a block; a window of 40 lets one go in a third.
      EXPECT_GE(decode(engine, {full(16)}, num_lookahead), 200 * 14 / 16 - 2);
      EXPECT_GE(decode(engine, {full(16), window(16, 40)}, num_lookahead), 200 * 13 / 16 - 2);
      EXPECT_GE(decode(engine, {full(16), chunked(16, 48)}, num_lookahead), 200 * 13 / 16 - 2);
      // The later release publishes a prompt's tail in a long block, at any time.
      const int num_at_rest = decode(engine, {full(16), window(8, 40)}, num_lookahead);
      EXPECT_EQ(num_at_rest > 0, engine == std::string("vllm-0.22.1"));
    }
}

TEST(TableRest, ARequestThatHoldsNothingIsNotAtRest) {
  EngineConfig config;
  Decode run(config, {full(16)});
  run.extend_hashes();
  EXPECT_FALSE(run.cache.is_at_rest(*run.request, 1, 0));
  ASSERT_TRUE(run.allocate(20, 0));
  run.request->num_computed_tokens = 20;
  EXPECT_TRUE(run.cache.is_at_rest(*run.request, 1, 0));
  run.cache.free(*run.request);
  EXPECT_FALSE(run.cache.is_at_rest(*run.request, 1, 0));
}

}  // namespace
}  // namespace lockstep
