// Where the releases between 0.26.0 and 0.33.0 part from both, by hand: what recordings do not show
// or show in long runs only.
#include <gtest/gtest.h>

#include "reference/cache/group_manager.h"
#include "reference/plan/block_sizes.h"
#include "tests/reference/engine.h"

namespace lockstep {
namespace {

EngineConfig engine_of(std::string engine) {
  EngineConfig config;
  config.engine = std::move(engine);
  config.max_num_batched_tokens = 64;
  config.max_model_len = 200;
  return config;
}

EngineConfig drafting(std::string engine, SpecMethod method, std::int32_t num_spec_tokens) {
  EngineConfig config = engine_of(std::move(engine));
  config.spec_method = method;
  config.num_spec_tokens = num_spec_tokens;
  return config;
}

// Tokens that a resend of a prompt of 33 tokens enters with: 32 are hit. -1: it waits.
std::int32_t enters_with(std::string engine, bool beside_another, std::int32_t max_model_len) {
  EngineConfig config = drafting(std::move(engine), SpecMethod::ngram, 3);
  config.max_model_len = max_model_len;
  Engine vllm(config, {full(16)}, 20);
  vllm.add("first", prompt_of(1, 33), 1);
  vllm.finish_all();
  if (beside_another) vllm.add("other", prompt_of(2, 5));
  vllm.step();
  vllm.add("again", prompt_of(1, 33), 1);
  const auto tokens = tokens_of(vllm.scheduler(), vllm.step());
  return tokens.contains("again") ? tokens.at("again") : -1;
}

TEST(Releases, PadARequestThatEntersAsADecodeBesideOthersAndLaterAfterAHit) {
  EXPECT_EQ(enters_with("vllm-0.24.0", true, 200), 1);
  EXPECT_EQ(enters_with("vllm-0.28.0", true, 200), 4);
  EXPECT_EQ(enters_with("vllm-0.29.0", true, 200), 4);
  for (const char* engine : {"vllm-0.28.0", "vllm-0.29.0"})
    EXPECT_EQ(enters_with(engine, false, 200), 1) << engine;
  EXPECT_EQ(enters_with("vllm-0.30.0", false, 200), 4);
}

TEST(Releases, LetARequestWhoseDraftsExceedTheModelWaitOrEnterWithout) {
  EXPECT_EQ(enters_with("vllm-0.28.0", true, 35), -1);
  EXPECT_EQ(enters_with("vllm-0.28.0", true, 36), 4);
  EXPECT_EQ(enters_with("vllm-0.29.0", true, 35), 1);
  EXPECT_EQ(enters_with("vllm-0.29.0", true, 36), 1);  // no place for the token behind them
  EXPECT_EQ(enters_with("vllm-0.29.0", true, 37), 4);
}

// The drafts of a request that enters stay, although its tokens are cut.
TEST(Releases, KeepDraftsOfTokensThatAreCutOffIn0280) {
  EngineConfig config = drafting("vllm-0.28.0", SpecMethod::ngram, 3);
  config.long_prefill_token_threshold = 2;
  Engine vllm(config, {full(16)}, 60);
  vllm.add("other", prompt_of(2, 2));
  vllm.step();
  vllm.add("one", prompt_of(1, 1));
  const SchedulerOutput& output = vllm.scheduler().schedule();
  ASSERT_EQ(output.scheduled.size(), 2u);
  EXPECT_EQ(output.scheduled[1].num_tokens, 2);
  EXPECT_EQ(output.scheduled[1].num_spec, 3);
}

// Tokens that a resend of a prompt of whole blocks hits with EAGLE and a window.
std::int32_t eagle_hit(std::string engine) {
  Engine vllm(drafting(std::move(engine), SpecMethod::eagle, 1), {full(16), window(16, 20)}, 60);
  vllm.add("first", prompt_of(1, 64), 1);
  vllm.finish_all();
  vllm.add("again", prompt_of(1, 64), 1);
  return vllm.scheduler().schedule().scheduled.at(0).computed;
}

TEST(Releases, SearchWithEagleToTheEndOfThePromptSince0320) {
  EXPECT_EQ(eagle_hit("vllm-0.31.0"), 32);
  EXPECT_EQ(eagle_hit("vllm-0.32.0"), 48);
  EXPECT_EQ(eagle_hit("vllm-0.33.0"), 48);
}

TEST(Releases, KeepTheLastStateThatAResendHitsSince0320) {
  const auto ends = [](const char* engine, SpecMethod method) {
    return hit_end_of(drafting(engine, method, 1), engine_profile(engine));
  };
  for (const char* engine : {"vllm-0.29.0", "vllm-0.31.0"}) {
    EXPECT_EQ(ends(engine, SpecMethod::ngram).last_state(96, 32), 96);
    EXPECT_EQ(ends(engine, SpecMethod::ngram).last_part(96, 16), 96);
    EXPECT_EQ(ends(engine, SpecMethod::eagle).last_state(96, 32), 64);
  }
  EXPECT_EQ(ends("vllm-0.32.0", SpecMethod::ngram).last_state(96, 32), 64);
  EXPECT_EQ(ends("vllm-0.32.0", SpecMethod::ngram).last_part(96, 16), 80);
  EXPECT_EQ(ends("vllm-0.32.0", SpecMethod::eagle).last_state(96, 32), 64);
  // The part that EAGLE drops of every hit.
  EXPECT_EQ(ends("vllm-0.29.0", SpecMethod::eagle).last_part(96, 16), 96);
  EXPECT_EQ(ends("vllm-0.30.0", SpecMethod::eagle).last_part(96, 16), 80);
  EXPECT_EQ(ends("vllm-0.32.0", SpecMethod::eagle).last_part(96, 16), 80);
}

// A request of which groups[0] holds `num_blocks` of the pool.
Request holding(BlockPool& pool, std::uint32_t num_tokens, std::int64_t num_blocks) {
  RequestSpec spec;
  spec.name = "a";
  spec.prompt = prompt_of(1, num_tokens);
  Request request(std::move(spec), 1);
  request.hashes.extend({HashAlgorithm::content, 16}, request.tokens, "");
  pool.get_new_blocks(num_blocks, request.groups[0].blocks);
  return request;
}

// Places of the blocks that are published of a prompt.
std::vector<std::size_t> published(const EngineConfig& config, const KVCacheGroupSpec& group,
                                   BlockSizes sizes, std::uint32_t num_tokens) {
  BlockPool pool(20, true, FreedBlocks::append);
  const auto manager = GroupManager::create(group.spec, 0, config, sizes, pool);
  Request request = holding(pool, num_tokens, num_tokens / group.spec.block_size);
  manager->cache_blocks(request, static_cast<std::int32_t>(num_tokens));
  std::vector<std::size_t> places;
  const std::vector<BlockId>& blocks = request.groups[0].blocks;
  for (std::size_t i = 0; i < blocks.size(); ++i)
    if (pool.is_cached(blocks[i])) places.push_back(i);
  return places;
}

TEST(Releases, RegisterTheTailOfAPromptOfWholeHashesBefore0320) {
  for (const auto& [engine, stored] : {std::pair("vllm-0.31.0", 3), std::pair("vllm-0.32.0", 2)}) {
    BlockPool pool(20, true, FreedBlocks::append);
    const auto manager = GroupManager::create(full(32).spec, 0, engine_of(engine), {32, 16}, pool);
    Request request = holding(pool, 80, 3);
    manager->cache_blocks(request, 80);
    EXPECT_EQ(pool.take_counters().stored, stored) << engine;
  }
}

TEST(Releases, RetainWhatResendsAndContinuationsHitWithEagleSince0300) {
  EngineConfig config = drafting("vllm-0.29.0", SpecMethod::eagle, 1);
  config.prefix_cache_retention_interval = 0;
  EXPECT_EQ(published(config, window(16, 20), {16, 16}, 160), (std::vector<std::size_t>{7, 8, 9}));
  config.engine = "vllm-0.30.0";
  EXPECT_EQ(published(config, window(16, 20), {16, 16}, 160),
            (std::vector<std::size_t>{6, 7, 8, 9}));
}

TEST(Releases, RetainTheStateWhereHitsEndSince0290) {
  EngineConfig config = engine_of("vllm-0.29.0");
  config.prefix_cache_retention_interval = 0;
  const KVCacheGroupSpec group = states(64, MambaCacheMode::align);
  EXPECT_EQ(published(config, group, {128, 16, true}, 200), (std::vector<std::size_t>{2}));
  config.engine = "vllm-0.29.0,masks_at_hit_alignment=no";
  EXPECT_EQ(published(config, group, {128, 16, true}, 200), (std::vector<std::size_t>{1}));
}

TEST(Releases, CountTheStateBlocksThatAHitInsideABlockTakesSince0310) {
  for (const auto& [engine, blocks] : {std::pair("vllm-0.30.0", 2), std::pair("vllm-0.31.0", 1)}) {
    BlockPool pool(20, true, FreedBlocks::append);
    const auto manager = GroupManager::create(states(64, MambaCacheMode::align).spec, 0,
                                              engine_of(engine), {64, 16, true}, pool);
    const Request request = holding(pool, 56, 0);
    std::vector<BlockId> hit;
    pool.get_new_blocks(1, hit);
    pool.cache_part_of_block(hit[0], request.hashes[2], 0, 48);
    EXPECT_EQ(manager->num_blocks_to_allocate(request, hit,
                                              {.num_tokens = 56,
                                               .num_tokens_main_model = 56,
                                               .total_computed_tokens = 48,
                                               .num_local_computed_tokens = 48}),
              blocks)
        << engine;
  }
}

TEST(Releases, HitPartsOfStateBlocksUnderContextParallelismSince0290) {
  const std::vector groups{full(16), states(64, MambaCacheMode::align)};
  for (const auto& [engine, tokens] :
       {std::pair("vllm-0.28.0", 64), std::pair("vllm-0.29.0", 32)}) {
    EngineConfig config = engine_of(engine);
    config.mamba_cache_mode = MambaCacheMode::align;
    config.dcp = 2;
    EXPECT_EQ(resolve_block_sizes(config, groups)->cache_hit_alignment_tokens(), tokens) << engine;
  }
}

// Blocks that the first step zeroes, of full attention and of a window in another dtype.
TEST(Releases, ZeroBlocksOfMixedDtypesSince0271AndOfWindowsSince0280) {
  KVCacheGroupSpec fp8 = window(16, 20);
  fp8.spec.dtype = DType::fp8_e4m3;
  const auto zeroed = [&](const char* engine) {
    Engine vllm(engine_of(engine), {full(16), fp8}, 20);
    vllm.add("a", prompt_of(1, 20));
    return ids(vllm.scheduler().schedule().zero);
  };
  EXPECT_EQ(zeroed("vllm-0.26.0"), std::vector<std::int32_t>{});
  EXPECT_EQ(zeroed("vllm-0.27.1"), (std::vector{1, 2}));
  EXPECT_EQ(zeroed("vllm-0.28.0"), (std::vector{1, 2, 3, 4}));
}

TEST(Releases, AppendFreedBlocksWithoutAPrefixCacheIn0271) {
  for (const char* engine : {"vllm-0.26.0", "vllm-0.27.1", "vllm-0.28.0"}) {
    EngineConfig config = engine_of(engine);
    config.enable_prefix_caching = false;
    Engine vllm(config, {full(16)}, 10);
    vllm.add("a", prompt_of(1, 20), 1);
    vllm.finish_all();
    const bool appends = std::string_view(engine) == "vllm-0.27.1";
    EXPECT_EQ(index_of(vllm.scheduler().pool().free_queue().front()), appends ? 3 : 2) << engine;
  }
}

}  // namespace
}  // namespace lockstep
