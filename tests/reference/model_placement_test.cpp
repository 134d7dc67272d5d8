// A model's plan where groups overlay one allocation: whose refusals are whose, and what a replay
// gets of it.
#include "reference/memory/model_placement.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <string>

#include "reference/plan/page_groups.h"

namespace lockstep {
namespace {

NamedSpec attention(int number, std::int64_t heads) {
  NamedSpec layer{fmt::format("layers.{}.attn", number), {}};
  layer.spec.block_size = 0;
  layer.spec.num_kv_heads = heads;
  layer.spec.head_size = 64;
  return layer;
}
NamedSpec window_layer(int number, std::int64_t heads) {
  NamedSpec layer = attention(number, heads);
  layer.spec.kind = CacheKind::sliding_window;
  layer.spec.sliding_window = 128;
  return layer;
}
NamedSpec linear(int number) {
  NamedSpec layer{fmt::format("layers.{}.linear", number), {}};
  layer.spec.kind = CacheKind::mamba;
  layer.spec.block_size = 0;
  layer.spec.states = {{{3, 512}, DType::bf16}, {{8, 64, 64}, DType::fp32}};
  return layer;
}

// Three states, an attention layer, as Qwen3-Next.
LayerSpecs hybrid() {
  LayerSpecs layers;
  for (int i = 0; i < 8; ++i) layers.push_back(i % 4 == 3 ? attention(i, 2) : linear(i));
  return layers;
}

PlanOptions options_with(AttentionBackend backend = AttentionBackend::flash_attn) {
  PlanOptions options;
  options.backend = backend;
  options.mamba_cache_mode = MambaCacheMode::align;
  options.max_model_len = 4096;
  options.num_gpu_blocks_override = 1000;
  return options;
}

Result<ModelPlacement> place(const LayerSpecs& layers, const PlanOptions& options,
                             const std::string& order) {
  return place_model(layers, DType::bf16, options, order);
}

TEST(ModelPlacement, StatesInFp32DoNotSplitTheBlocksOfFlashAttention) {
  for (const char* order : {"LBNHC", "LBHNC", "BLNHC", "BLHNC"}) {
    const auto placed = place(hybrid(), options_with(), order);
    ASSERT_TRUE(placed) << order << ": " << placed.error().message;
    // 134,144 bytes of states in tokens of 512 bytes, up to 16: 272.
    EXPECT_EQ(placed->stages.alignment->block_size, 272);
    const auto plan = replay_plan(placed->stages.workers.front(), hybrid());
    ASSERT_TRUE(plan) << plan.error().message;
    EXPECT_EQ(plan->groups.size(), 4u);
    EXPECT_FALSE(has_unlike_pages(*plan));
    const auto kernels = placed_kernel_sizes(*plan, AttentionBackend::flash_attn);
    ASSERT_TRUE(kernels);
    for (std::size_t g = 0; g < plan->groups.size(); ++g)
      EXPECT_EQ((*kernels)[g], 272) << "group " << g;
    EXPECT_TRUE(placed_layout(*plan, AttentionBackend::flash_attn, *from_name<CacheLayout>(order)));
  }
}

TEST(ModelPlacement, BlocksThatAWorkerWouldHaveToSplitInPackedMemoryAreToldAsItsOwnRefusal) {
  const PlanOptions options = options_with(AttentionBackend::flashinfer);
  const auto split = place(hybrid(), options, "LBNHC");
  ASSERT_TRUE(split) << split.error().message;
  EXPECT_EQ(split->pages.front().kernel_block_sizes.back(), 16);  // 32 does not divide 272
  const auto packed = place(hybrid(), options, "BLNHC");
  ASSERT_FALSE(packed);
  EXPECT_TRUE(
      packed.error().message.starts_with("the engine core accepts this plan, but the worker"))
      << packed.error().message;
}

TEST(ModelPlacement, ARefusalOfTheCoreNamesItsStage) {
  const auto order = place(hybrid(), options_with(), "LHBNC");
  ASSERT_FALSE(order);
  EXPECT_TRUE(order.error().message.starts_with("refused by the engine core (layout): "))
      << order.error().message;
  PlanOptions options = options_with();
  options.mamba_cache_mode = MambaCacheMode::all;
  const auto mode = place(hybrid(), options, "");
  ASSERT_FALSE(mode);
  EXPECT_TRUE(mode.error().message.starts_with("refused by the engine core (options): "))
      << mode.error().message;
  options = options_with();
  options.num_gpu_blocks_override = 8;
  const auto memory = place(hybrid(), options, "");
  ASSERT_FALSE(memory);
  EXPECT_TRUE(memory.error().message.starts_with("refused by the engine core (plan): "))
      << memory.error().message;
}

TEST(ModelPlacement, UnlikePagesLieSideBySideWithBlocksOutermostAndAreMadeEqualOtherwise) {
  LayerSpecs layers;
  for (int i = 0; i < 6; ++i) layers.push_back(i % 2 == 0 ? attention(i, 4) : window_layer(i, 2));
  const auto packed = place(layers, options_with(), "BLNHC");
  ASSERT_TRUE(packed) << packed.error().message;
  const auto plan = replay_plan(packed->stages.workers.front(), layers);
  ASSERT_TRUE(plan);
  EXPECT_TRUE(has_unlike_pages(*plan));
  for (const KVCacheGroupSpec& group : plan->groups) {
    EXPECT_EQ(group.spec.block_size, 16);
    EXPECT_FALSE(group.spec.page_size_padded);
    EXPECT_FALSE(group.is_uniform_type());
  }
  EXPECT_EQ(placed_layout(*plan, AttentionBackend::flash_attn, CacheLayout::BLNHC)
                ->tensor_size_bytes.size(),
            1u);
  const auto equal = place(layers, options_with(), "");
  ASSERT_TRUE(equal) << equal.error().message;
  EXPECT_EQ(equal->stages.order->order, CacheLayout::LBNHC);
  const auto unified = replay_plan(equal->stages.workers.front(), layers);
  ASSERT_TRUE(unified);
  EXPECT_FALSE(has_unlike_pages(*unified));
  EXPECT_EQ(unified->groups.back().spec.block_size, 32);
}

TEST(ModelPlacement, StagesOfAPipelineAreCutByTheNumbersOfLayersAndShareTheSmallestPool) {
  LayerSpecs layers;
  for (int i = 0; i < 5; ++i) {
    layers.push_back(attention(i, 2));
    if (i < 2) layers.push_back({fmt::format("layers.{}.draft", i), attention(i, 2).spec});
  }
  PlanOptions options = options_with();
  options.pp = 2;
  options.num_gpu_blocks_override.reset();
  options.memory_bytes = std::int64_t{1} << 30;
  const auto placed = place(layers, options, "");
  ASSERT_TRUE(placed) << placed.error().message;
  ASSERT_EQ(placed->stages.workers.size(), 2u);
  ASSERT_EQ(placed->pages.size(), 2u);
  // What does not divide goes to the stage before the last: layers 0 to 2, with two drafts.
  EXPECT_EQ(placed->pages[0].layers.size(), 5u);
  EXPECT_EQ(placed->pages[1].layers.size(), 2u);
  EXPECT_EQ(placed->stages.workers[0].num_blocks, placed->stages.workers[1].num_blocks);
  EXPECT_LT(placed->pages[1].device_bytes, placed->pages[0].device_bytes);
}

// vllm 54711.
TEST(ModelPlacement, AStageWithoutALayerOfAGroupKillsItsWorker) {
  const LayerSpecs layers = {attention(0, 4), attention(1, 4), window_layer(2, 2),
                             window_layer(3, 2)};
  PlanOptions options = options_with();
  options.pp = 2;
  const auto placed = place(layers, options, "BLNHC");
  ASSERT_FALSE(placed);
  EXPECT_NE(placed.error().message.find("the worker of stage 0 crashes"), std::string::npos)
      << placed.error().message;
}

TEST(ModelPlacement, FormatsOfRowsThatOneBackendReadsTakeIt) {
  LayerSpecs layers = {attention(0, 2), attention(1, 2)};
  PlanOptions options = options_with();
  EXPECT_EQ(only_reader(layers), std::nullopt);
  options.kv_quant_mode = KVQuantMode::nvfp4;
  options.kv_dtype = DType::uint8;
  for (NamedSpec& layer : layers) {
    layer.spec.kv_quant_mode = KVQuantMode::nvfp4;
    layer.spec.dtype = DType::uint8;
  }
  EXPECT_EQ(only_reader(layers), AttentionBackend::flashinfer);
  options.block_size = 128;
  const auto split = place(layers, options, "LBNHC");
  ASSERT_TRUE(split) << split.error().message;
  EXPECT_EQ(split->pages.front().kernel_block_sizes.front(), 64);
  EXPECT_FALSE(place(layers, options, "BLNHC"));
}

// As DeepSeek-V3.2: sparse attention, each layer with an indexer.
LayerSpecs sparse_layers(int count) {
  LayerSpecs layers;
  for (int i = 0; i < count; ++i) {
    NamedSpec attn{fmt::format("layers.{}.attn", i), {}};
    attn.spec.kind = CacheKind::mla;
    attn.spec.block_size = 0;
    attn.spec.num_kv_heads = 1;
    attn.spec.head_size = 576;
    attn.spec.dtype = DType::uint8;
    attn.spec.cache_dtype_str = "fp8_ds_mla";
    NamedSpec indexer{fmt::format("layers.{}.indexer", i), attn.spec};
    indexer.spec.head_size = 132;
    indexer.spec.cache_dtype_str.clear();
    attn.index_topk = 2048;
    layers.push_back(attn);
    layers.push_back(indexer);
  }
  return layers;
}

// The figures are those of vLLM 0.33.0 (a recording of layouts: host_pool_gib 64, 40 GiB).
TEST(ModelPlacement, HiSparseIsPlannedFromAModelsLayersAsTheReleasePlansIt) {
  PlanOptions options;
  options.host_pool_bytes = std::int64_t{64} << 30;
  const LayerSpecs layers = sparse_layers(61);
  const auto placed = place(layers, options, "");
  ASSERT_TRUE(placed) << placed.error().message;
  const Placement& placement = placed->stages.workers.front();
  EXPECT_EQ(placement.num_blocks, 78692);
  ASSERT_TRUE(placement.host);
  const auto capacity = capacity_of(placement, placed->options);
  ASSERT_TRUE(capacity);
  EXPECT_EQ(capacity->tokens, 1549627);
  const auto plan = replay_plan(placement, layers);
  ASSERT_TRUE(plan) << plan.error().message;
  const auto checked = check_page_groups(plan->groups);
  EXPECT_TRUE(checked) << checked.error().message;
  EXPECT_EQ(plan->groups.back().spec.blocks_per_request, 64);
  EXPECT_EQ(plan->groups.back().spec.page_copy_bytes, 41984);
  options.device_buffer_rows = 4160;
  const auto larger = place(layers, options, "");
  ASSERT_TRUE(larger) << larger.error().message;
  EXPECT_EQ(larger->stages.workers.front().groups.back().spec.blocks_per_request, 65);
}

TEST(ModelPlacement, HiSparseIsForModelsThatSayHowManyRowsTheyChoose) {
  PlanOptions options;
  options.host_pool_bytes = std::int64_t{64} << 30;
  LayerSpecs layers = sparse_layers(2);
  for (NamedSpec& layer : layers) layer.index_topk = 0;
  const auto placed = place(layers, options, "");
  ASSERT_FALSE(placed);
  EXPECT_EQ(placed.error().message,
            "host pages: no layer of the model says index_topk, the rows that it chooses");
}

}  // namespace
}  // namespace lockstep
