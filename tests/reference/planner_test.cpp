// Plans from layers and memory: aligned sizes, groups, tensors, merged workers, admission; the
// figures of the public discussions that the rules come from.
#include "reference/plan/planner.h"

#include <gtest/gtest.h>

#include "reference/plan/capacity.h"
#include "reference/plan/grouping.h"
#include "reference/plan/model_spec.h"
#include "reference/plan/page_size.h"

namespace lockstep {
namespace {

KVCacheSpec full_attention(std::int64_t heads, std::int64_t head_size,
                           std::int64_t block_size = 0) {
  KVCacheSpec spec;
  spec.num_kv_heads = heads;
  spec.head_size = head_size;
  spec.block_size = block_size;
  return spec;
}

KVCacheSpec window_of_heads(std::int64_t heads, std::int64_t head_size, std::int64_t tokens) {
  KVCacheSpec spec = full_attention(heads, head_size);
  spec.kind = CacheKind::sliding_window;
  spec.sliding_window = tokens;
  return spec;
}

// A Gated DeltaNet model: `linear` state layers for each attention layer.
ModelSpec delta_net(std::int64_t attention, std::int64_t linear, std::int64_t v_heads,
                    std::int64_t kv_heads) {
  ModelSpec model;
  LayerKind states;
  states.name = "linear";
  states.spec.kind = CacheKind::mamba;
  states.states = {.num_heads = v_heads,
                   .head_dim = 128,
                   .num_k_heads = 16,
                   .head_k_dim = 128,
                   .conv_kernel = 4};
  states.ssm_dtype = DType::fp32;
  LayerKind rows;
  rows.name = "attn";
  rows.spec = full_attention(kv_heads, 256);
  model.kinds = {states, rows};
  for (std::int64_t i = 0; i < attention * (linear + 1); ++i)
    model.layers.push_back({i, i % (linear + 1) == linear ? 1u : 0u});
  return model;
}

TensorPlan planned(const ModelSpec& model, const PlanOptions& options) {
  const auto layers = layer_specs(model, options);
  EXPECT_TRUE(layers) << layers.error().message;
  auto plan = plan_memory(*layers, options);
  EXPECT_TRUE(plan) << plan.error().message;
  return std::move(*plan);
}

LayerSpecs named(std::initializer_list<std::pair<const char*, KVCacheSpec>> layers) {
  LayerSpecs specs;
  for (const auto& [name, spec] : layers) specs.push_back({name, spec});
  return specs;
}

struct Aligned {
  const char* model;
  std::int64_t v_heads, kv_heads, tp, block_size;
};
class AlignedSizesOf : public testing::TestWithParam<Aligned> {};

TEST_P(AlignedSizesOf, APageHoldsTheStatesInFloat32) {
  const Aligned& a = GetParam();
  PlanOptions options;
  options.tp = a.tp;
  const TensorPlan plan = planned(delta_net(4, 3, a.v_heads, a.kv_heads), options);
  EXPECT_EQ(plan.aligned.block_size, a.block_size) << a.model;
  for (const KVCacheGroupSpec& group : plan.workers.front().groups)
    EXPECT_EQ(page_size_bytes(group.spec),
              page_size_bytes(plan.workers.front().groups.back().spec));
}

INSTANTIATE_TEST_SUITE_P(Domain, AlignedSizesOf,
                         testing::Values(Aligned{"Qwen3.5-397B-A17B", 64, 2, 1, 2096},
                                         Aligned{"Qwen3.5-397B-A17B", 64, 2, 2, 2096},
                                         Aligned{"Qwen3.6-35B-A3B", 32, 2, 1, 1056},
                                         Aligned{"Qwen3-Next-80B-A3B", 32, 2, 1, 1056},
                                         Aligned{"Qwen3.5-27B", 48, 4, 1, 784},
                                         Aligned{"Qwen3.5-0.8B", 16, 2, 1, 544},
                                         Aligned{"Qwen3.5-4B", 32, 4, 1, 528}));

TEST(Alignment, ModeAllIsAMultipleOfTheChunkAndTheKernelAlignment) {
  PlanOptions options;
  options.mamba_cache_mode = MambaCacheMode::all;
  options.mamba_chunk_size = 24;  // lcm(24, 16) = 48
  const TensorPlan plan = planned(delta_net(4, 3, 32, 2), options);
  EXPECT_EQ(plan.aligned.block_size % 48, 0);
  EXPECT_EQ(plan.aligned.mamba_block_size, plan.aligned.block_size);
  EXPECT_GE(plan.aligned.block_size, 1048);
  EXPECT_LT(plan.aligned.block_size, 1056 + 48);
}

TEST(Alignment, NothingIsPaddedWhenTheStateFillsThePage) {
  PlanOptions options;
  options.tp = 2;
  options.num_spec = 1;  // the conv state is one row longer: 1,081,344 bytes = 1,056 tokens
  const TensorPlan plan = planned(delta_net(4, 3, 32, 2), options);
  EXPECT_EQ(plan.aligned.block_size, 1056);
  EXPECT_FALSE(plan.aligned.mamba_page_size_padded);
}

TEST(Packing, FifteenAndFortyFiveLayersByFourTakeFourTensorsAndThirteenGroups) {
  PlanOptions options;
  options.attn_pack = 4;
  const TensorPlan plan = planned(delta_net(15, 3, 64, 2), options);
  const KVCacheConfig& config = plan.workers.front();
  EXPECT_EQ(config.tensors.size(), 4u);
  ASSERT_EQ(config.groups.size(), 13u);
  const KVCacheGroupSpec& attention = config.groups.back();
  EXPECT_EQ(attention.layers_per_page, 4);
  EXPECT_EQ(attention.layer_names.size(), 15u);
  const Capacity capacity = capacity_of(config, options);
  EXPECT_EQ(capacity.groups.back().pack_waste_bytes, page_size_bytes(attention.spec));
  EXPECT_EQ(capacity.groups.back().absent_layer_bytes, 0);
  // The page stays that of one layer; the pool's has room for four.
  EXPECT_EQ(4 * page_size_bytes(attention.spec), page_size_bytes(config.groups.front().spec));
  EXPECT_EQ(config.tensors.front().size_bytes,
            4 * page_size_bytes(attention.spec) * config.num_blocks);
}

TEST(Packing, TheBlockShrinksFrom1056To272) {
  PlanOptions options;
  options.attn_pack = 4;
  EXPECT_EQ(planned(delta_net(10, 3, 32, 2), options).aligned.block_size, 272);
}

TEST(Packing, MoreLayersToAPageThanThereAreIsRefusedWithTheMost) {
  PlanOptions options;
  options.attn_pack = 5;
  const auto plan = plan_memory(*layer_specs(delta_net(4, 3, 32, 2), options), options);
  ASSERT_FALSE(plan);
  EXPECT_NE(plan.error().message.find("at most 4"), std::string::npos) << plan.error().message;
}

TEST(Groups, AKindWithMoreLayersIsDealtOutRoundRobin) {
  const auto specs = named({{"f0", full_attention(2, 64, 16)},
                            {"w0", window_of_heads(2, 64, 32)},
                            {"w1", window_of_heads(2, 64, 32)},
                            {"w2", window_of_heads(2, 64, 32)},
                            {"f1", full_attention(2, 64, 16)},
                            {"w3", window_of_heads(2, 64, 32)}});
  PlanOptions options;
  options.max_model_len = 64;
  const auto plan = plan_memory(specs, options);
  ASSERT_TRUE(plan) << plan.error().message;
  const auto& groups = plan->workers.front().groups;
  ASSERT_EQ(groups.size(), 3u);
  EXPECT_EQ(groups[0].layer_names, (std::vector<std::string>{"f0", "f1"}));
  EXPECT_EQ(groups[1].layer_names, (std::vector<std::string>{"w0", "w2"}));
  EXPECT_EQ(groups[2].layer_names, (std::vector<std::string>{"w1", "w3"}));
  EXPECT_EQ(plan->workers.front().tensors[1].shared_by,
            (std::vector<std::string>{"f1", "w2", "w3"}));
}

TEST(Groups, TheLargestKindRulesWhenItIsUnderOneAndAHalfTimesTheSmallest) {
  const auto size = [](std::vector<std::int64_t> kinds) { return layers_per_group(kinds); };
  EXPECT_EQ(size({12, 13}), 13);
  EXPECT_EQ(size({2, 3}), 2);  // 3 is not under 3
  EXPECT_EQ(size({10, 30}), 10);
}

TEST(Groups, HiddenStatesAreAddedBackWithTheCommonPage) {
  PlanOptions options;
  auto layers = *layer_specs(delta_net(4, 3, 64, 2), options);
  layers.push_back(hidden_state_layer(3, 2048, DType::bf16));
  const auto plan = plan_memory(layers, options);
  ASSERT_TRUE(plan) << plan.error().message;
  const KVCacheGroupSpec& hidden = plan->workers.front().groups.back();
  EXPECT_EQ(hidden.spec.block_size, 4292608 / (3 * 2048 * 2));
  EXPECT_EQ(hidden.spec.page_size_padded, 4292608);
  EXPECT_EQ(plan->workers.front().groups.size(), 5u);
}

TEST(Groups, EqualTokenSlotsWithDifferentPagesAreOneGroupOfUniformType) {
  PlanOptions options;
  options.max_model_len = 64;
  const auto plan =
      plan_memory(named({{"a", full_attention(8, 64)}, {"b", full_attention(2, 64)}}), options);
  ASSERT_TRUE(plan) << plan.error().message;
  const KVCacheConfig& config = plan->workers.front();
  ASSERT_EQ(config.groups.size(), 1u);
  EXPECT_TRUE(config.groups.front().is_uniform_type());
  EXPECT_EQ(config.tensors[0].size_bytes, 4 * config.tensors[1].size_bytes);
}

TEST(Groups, SmallerPagesGrowByLongerBlocks) {
  PlanOptions options;
  options.max_model_len = 64;
  const auto plan = plan_memory(
      named({{"f", full_attention(2, 64)}, {"w", window_of_heads(8, 64, 32)}}), options);
  ASSERT_TRUE(plan) << plan.error().message;
  EXPECT_EQ(plan->workers.front().groups[0].spec.block_size, 64);
  EXPECT_EQ(plan->workers.front().groups[1].spec.block_size, 16);
}

TEST(Groups, PagesThatDoNotDivideAreRefusedWithTheNextThatDoes) {
  PlanOptions options;
  options.max_model_len = 64;
  const auto plan = plan_memory(
      named({{"f", full_attention(3, 64)}, {"w", window_of_heads(8, 64, 32)}}), options);
  ASSERT_FALSE(plan);
  EXPECT_NE(plan.error().message.find("16384 bytes"), std::string::npos) << plan.error().message;
}

TEST(Groups, WithoutTheHybridManagerWindowsAreFullAttention) {
  PlanOptions options;
  options.max_model_len = 64;
  options.disable_hybrid_kv_cache_manager = true;
  const auto plan = plan_memory(
      named({{"f", full_attention(2, 64)}, {"w", window_of_heads(2, 64, 32)}}), options);
  ASSERT_TRUE(plan) << plan.error().message;
  ASSERT_EQ(plan->workers.front().groups.size(), 1u);
  EXPECT_EQ(plan->workers.front().groups[0].spec.kind, CacheKind::full_attention);
  EXPECT_EQ(plan->workers.front().groups[0].spec.sliding_window, 32);
}

TEST(Groups, TheApproximateGcdPadsLeastAndPrefersTheLarger) {
  const std::vector<std::int64_t> values{11, 10, 21};
  EXPECT_EQ(approximate_gcd(values, 11), 11);
  const std::vector<std::int64_t> even{4, 8};
  EXPECT_EQ(approximate_gcd(even, 1), 4);
}

TEST(Workers, TheSmallestPoolRulesAndTensorsShrinkInProportion) {
  const LayerSpecs layers = named({{"layers.0.attn", full_attention(2, 64)},
                                   {"layers.1.attn", full_attention(2, 64)},
                                   {"layers.2.attn", full_attention(2, 64)}});
  PlanOptions options;
  options.max_model_len = 64;
  options.pp = 2;
  options.memory_bytes = 10 << 20;
  const auto plan = plan_memory(layers, options);
  ASSERT_TRUE(plan) << plan.error().message;
  // The stage before the last takes the remainder.
  EXPECT_EQ(plan->workers[0].groups[0].layer_names.size(), 2u);
  const std::int64_t page = 2 * 16 * 2 * 64 * 2;
  EXPECT_EQ(plan->workers[0].num_blocks, (10 << 20) / page / 2);
  EXPECT_EQ(plan->workers[1].num_blocks, plan->workers[0].num_blocks);
  EXPECT_EQ(plan->workers[1].tensors[0].size_bytes, plan->workers[1].num_blocks * page);
}

TEST(Workers, AStageWithoutLayersKeepsOnlyTheNullBlock) {
  PlanOptions options;
  options.max_model_len = 64;
  options.pp = 3;
  const auto plan = plan_memory(
      named({{"layers.0.attn", full_attention(2, 64)}, {"layers.1.attn", full_attention(2, 64)}}),
      options);
  ASSERT_TRUE(plan) << plan.error().message;
  ASSERT_EQ(plan->workers.size(), 3u);
  EXPECT_EQ(plan->workers[2].num_blocks, 1);
  EXPECT_TRUE(plan->workers[2].tensors.empty());
}

TEST(Admission, TheLongestLengthThatFitsIsNamedAndFits) {
  PlanOptions options;
  options.max_model_len = 4096;
  options.memory_bytes = 1 << 20;
  const LayerSpecs layers = named({{"a", full_attention(2, 64)}});
  const auto plan = plan_memory(layers, options);
  ASSERT_FALSE(plan);
  EXPECT_NE(plan.error().message.find("at most 2048"), std::string::npos) << plan.error().message;
  options.max_model_len = 2048;
  EXPECT_TRUE(plan_memory(layers, options));
  options.max_model_len = 2049;
  EXPECT_FALSE(plan_memory(layers, options));
}

TEST(Admission, MemoryForNoBlockIsRefused) {
  PlanOptions options;
  options.max_model_len = 1;
  options.memory_bytes = 100;
  EXPECT_FALSE(plan_memory(named({{"a", full_attention(2, 64)}}), options));
  options.memory_bytes = 0;
  const auto plan = plan_memory(named({{"a", full_attention(2, 64)}}), options);
  ASSERT_FALSE(plan);
  EXPECT_NE(plan.error().message.find("8192 bytes"), std::string::npos) << plan.error().message;
}

TEST(Admission, TheOverrideCountsInsteadOfTheMemory) {
  PlanOptions options;
  options.max_model_len = 160;
  options.memory_bytes = 1;
  options.num_gpu_blocks_override = 10;
  const auto plan = plan_memory(named({{"a", full_attention(2, 64)}}), options);
  ASSERT_TRUE(plan) << plan.error().message;
  EXPECT_EQ(plan->workers.front().num_blocks, 10);
  // Ten blocks of which one is the null block: a request of ten never runs.
  ASSERT_EQ(plan->warnings.size(), 1u);
  EXPECT_NE(plan->warnings[0].find("null block"), std::string::npos);
  options.num_gpu_blocks_override = 9;
  EXPECT_FALSE(plan_memory(named({{"a", full_attention(2, 64)}}), options));
}

TEST(Admission, MoreRequestsThanStateBlocksAreRefusedWithTheMost) {
  PlanOptions options;
  options.max_num_seqs = 100;
  options.num_gpu_blocks_override = 99;
  const auto plan = plan_memory(*layer_specs(delta_net(4, 3, 16, 2), options), options);
  ASSERT_FALSE(plan);
  EXPECT_NE(plan.error().message.find("at most 99"), std::string::npos) << plan.error().message;
}

TEST(Admission, HeadsThatTpDoesNotDivideAreRefusedWithTheNearest) {
  PlanOptions options;
  options.tp = 3;
  const auto layers = layer_specs(delta_net(4, 3, 32, 4), options);
  ASSERT_FALSE(layers);
  EXPECT_NE(layers.error().message.find("nearest tp that works is"), std::string::npos)
      << layers.error().message;
}

TEST(Admission, AHiddenStateLongerThanThePageIsRefused) {
  PlanOptions options;
  options.max_model_len = 64;
  LayerSpecs layers = named({{"f", full_attention(1, 16)}, {"w", window_of_heads(1, 16, 32)}});
  layers.push_back(hidden_state_layer(8, 4096, DType::bf16));
  const auto plan = plan_memory(layers, options);
  ASSERT_FALSE(plan);
  EXPECT_NE(plan.error().message.find("one token takes 65536 bytes"), std::string::npos)
      << plan.error().message;
}

TEST(Admission, ContextParallelRanksShareTheTokens) {
  PlanOptions options;
  options.max_model_len = 4096;
  const KVCacheSpec spec = full_attention(2, 64, 16);
  EXPECT_EQ(max_blocks_per_request(spec, options), 256);
  options.dcp = 4;
  options.pcp = 2;
  EXPECT_EQ(max_blocks_per_request(spec, options), 32);
  const auto plan = plan_memory(
      named({{"f", full_attention(2, 64)}, {"w", window_of_heads(2, 64, 32)}}), options);
  ASSERT_FALSE(plan);  // windows cannot be split
}

TEST(Admission, ABlockSizeThatNoKernelTakesIsRefusedWithTheNearest) {
  PlanOptions options;
  options.max_model_len = 64;
  options.block_size = 24;
  const auto plan = plan_memory(named({{"a", full_attention(2, 64)}}), options);
  ASSERT_FALSE(plan);
  EXPECT_NE(plan.error().message.find("nearest that works is 32"), std::string::npos)
      << plan.error().message;
}

TEST(Admission, SizesBeyondAnyMachineAreRefusedInsteadOfOverflowing) {
  PlanOptions options;
  options.max_model_len = 64;
  const auto rows =
      plan_memory(named({{"a", full_attention(1 << 20, std::int64_t{1} << 40)}}), options);
  ASSERT_FALSE(rows);
  EXPECT_NE(rows.error().message.find("fits no machine"), std::string::npos)
      << rows.error().message;
  KVCacheSpec states;
  states.kind = CacheKind::mamba;
  states.block_size = 0;
  states.states = {{{std::int64_t{1} << 40, std::int64_t{1} << 40}, DType::fp32}};
  EXPECT_FALSE(plan_memory(named({{"s", states}, {"a", full_attention(2, 64)}}), options));
}

TEST(Admission, ACacheThatNoRequestGrowsIntoStillNeedsRoomForABlock) {
  PlanOptions options;  // no encoder tokens: a request takes no block of cross attention
  KVCacheSpec cross = full_attention(2, 64);
  cross.kind = CacheKind::cross_attention;
  options.memory_bytes = 100;
  const auto plan = plan_memory(named({{"c", cross}}), options);
  ASSERT_FALSE(plan);
  EXPECT_NE(plan.error().message.find("room for no block"), std::string::npos)
      << plan.error().message;
}

}  // namespace
}  // namespace lockstep
