// Caches that are replicated over context parallel ranks, with sharded ones: block sizes, blocks,
// hits, plans.
#include <gtest/gtest.h>

#include "reference/memory/model_placement.h"
#include "reference/plan/block_sizes.h"
#include "reference/plan/capacity.h"
#include "tests/reference/engine.h"

namespace lockstep {
namespace {

EngineConfig two_ranks() {
  EngineConfig config;
  config.engine = "vllm-0.33.0";
  config.max_num_seqs = 4;
  config.max_num_batched_tokens = 128;
  config.max_model_len = 256;
  config.dcp = 2;
  return config;
}
KVCacheGroupSpec whole(KVCacheGroupSpec group) {
  group.spec.dcp_sharded = false;
  return group;
}

// layouts.jsonl has the first: llama-3.1-8b with a drafter, dcp 2.
TEST(WholeCaches, TheirBlocksAreHashedAndHitAsTheyAre) {
  const EngineConfig config = two_ranks();
  const auto sizes = resolve_block_sizes(config, std::vector{full(16), whole(full(16))});
  EXPECT_EQ(sizes->scheduler_block_size, 32);
  EXPECT_EQ(sizes->hash_block_size, 16);
  EXPECT_EQ(sizes->cache_hit_alignment_tokens(), 32);
  const auto alone = resolve_block_sizes(config, std::vector{whole(full(16))});
  EXPECT_EQ(alone->scheduler_block_size, 16);
  EXPECT_EQ(resolve_block_sizes(config, std::vector{full(16)})->scheduler_block_size, 32);
}

TEST(WholeCaches, ARequestTakesABlockForEvery16TokensOfItsOwn) {
  Engine engine(two_ranks(), {full(16), whole(full(16)), whole(window(16, 20))}, 60);
  const RequestId first = engine.add("first", prompt_of(1, 100), 2);
  engine.step();
  EXPECT_EQ(engine.scheduler().block_table(first, 0).size(), 4u);
  EXPECT_EQ(engine.scheduler().block_table(first, 1).size(), 7u);
  EXPECT_EQ(engine.scheduler().block_table(first, 2).size(), 7u);
  engine.finish_all();
  // Three blocks of 32 tokens are full of both ranks' rows, and six of 16.
  const RequestId second = engine.add("second", prompt_of(1, 100), 1);
  const SchedulerOutput& output = engine.scheduler().schedule();
  ASSERT_EQ(output.scheduled.size(), 1u);
  EXPECT_EQ(output.scheduled.front().computed, 96);
  EXPECT_EQ(engine.scheduler().block_table(second, 0).size(), 4u);
  EXPECT_EQ(engine.scheduler().block_table(second, 1).size(), 7u);
}

TEST(WholeCaches, AreCountedWholeInWhatARequestNeeds) {
  EXPECT_EQ(planned_blocks_of_request(two_ranks(), std::vector{full(16)}), 8);
  EXPECT_EQ(planned_blocks_of_request(two_ranks(), std::vector{full(16), whole(full(16))}), 24);
}

TEST(WholeCaches, ReleasesThatDealOutEveryLayerRefuseThem) {
  EngineConfig config = two_ranks();
  config.engine = "vllm-0.29.0";
  const auto refused = Scheduler::create(config, {full(16), whole(full(16))}, 20);
  ASSERT_FALSE(refused);
  EXPECT_EQ(
      refused.error().message,
      "replicated caches (dcp_sharded) with context parallelism: vllm-0.29.0 has none that is "
      "modelled");
}

TEST(WholeCaches, WindowsThatAreDealtOutAreRefusedAndWholeOnesAreNot) {
  const auto refused = resolve_block_sizes(two_ranks(), std::vector{full(16), window(16, 20)});
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().message.find("cannot divide windows"), std::string::npos);
  EXPECT_TRUE(resolve_block_sizes(two_ranks(), std::vector{full(16), whole(window(16, 20))}));
}

NamedSpec layer(std::string name, bool is_draft, bool dcp_sharded) {
  NamedSpec named{.name = std::move(name), .spec = full(16).spec};
  named.spec.num_kv_heads = 1;
  named.spec.head_size = 128;
  named.spec.dcp_sharded = dcp_sharded;
  named.is_draft = is_draft;
  return named;
}

// EAGLE's and MTP's drafters run in the target's parallel configuration; those of DFlash without
// MLA at 1.
TEST(WholeCaches, OfADrafterGetAGroupOfTheirOwnWhereItRunsAtDcp1) {
  PlanOptions options;
  options.dcp = 2;
  options.max_model_len = 1024;
  options.num_gpu_blocks_override = 200;
  for (const bool is_dealt_out : {true, false}) {
    const LayerSpecs layers = {layer("layers.0.attn", false, true),
                               layer("layers.1.draft", true, is_dealt_out)};
    const auto placed = place_model(layers, DType::bf16, options, "");
    ASSERT_TRUE(placed) << placed.error().message;
    const auto plan = replay_plan(placed->stages.workers.front(), layers);
    ASSERT_TRUE(plan);
    ASSERT_EQ(plan->groups.size(), is_dealt_out ? 1u : 2u);
    EXPECT_EQ(plan->groups.back().spec.dcp_sharded, is_dealt_out);
    EXPECT_TRUE(plan->groups.front().spec.dcp_sharded);
  }
}

}  // namespace
}  // namespace lockstep
