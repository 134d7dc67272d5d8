// Where elements lie: strides of every order, padding, splits, packs; pages drawn without gaps.
#include "reference/plan/layout.h"

#include <gtest/gtest.h>

#include "reference/plan/page_size.h"
#include "reference/plan/planner.h"

namespace lockstep {
namespace {

KVCacheSpec full_spec(std::int64_t heads, std::int64_t head_size, std::int64_t block_size = 0) {
  KVCacheSpec spec;
  spec.num_kv_heads = heads;
  spec.head_size = head_size;
  spec.block_size = block_size;
  return spec;
}

KVCacheSpec states() {
  KVCacheSpec spec;
  spec.kind = CacheKind::mamba;
  spec.states = {{{3, 20}, DType::bf16}, {{300, 8}, DType::fp32}};
  return spec;
}

KVCacheConfig plan(const LayerSpecs& layers, std::int64_t num_blocks, std::int64_t pack = 1,
                   AttentionBackend backend = AttentionBackend::flash_attn) {
  PlanOptions options;
  options.backend = backend;
  options.attn_pack = pack;
  options.max_model_len = 64;
  options.num_gpu_blocks_override = 100;
  const auto planned = plan_memory(layers, options);
  EXPECT_TRUE(planned) << planned.error().message;
  return with_num_blocks(planned->workers.front(), num_blocks);
}

MemoryPlan layout(const KVCacheConfig& config, CacheLayout order = CacheLayout::NHD,
                  AttentionBackend backend = AttentionBackend::flash_attn) {
  const auto pool = pool_layout(config, backend, order);
  EXPECT_TRUE(pool) << pool.error().message;
  return *pool;
}

TEST(Layout, AttentionAloneKeepsAllKBeforeAllV) {
  const KVCacheConfig config = plan({{"a", full_spec(2, 8)}}, 3);
  const MemoryPlan pool = layout(config);
  const LayerMemory& layer = pool.layers[0];
  const std::int64_t half = 16 * 2 * 8 * 2;
  EXPECT_EQ(layer.row_begin(BlockId{2}, 1, 5, 1), 3 * half + 2 * half + 5 * 32 + 16);
  EXPECT_EQ(layer.regions, (std::vector<BlockRegion>{{0, half, half}, {3 * half, half, half}}));
}

TEST(Layout, BesideStatesKAndVLieInThePageKernelBlockByKernelBlock) {
  const KVCacheConfig config = plan({{"s", states()}, {"a", full_spec(2, 16)}}, 3);
  const MemoryPlan pool = layout(config);
  const LayerMemory& layer = pool.layers[1];
  ASSERT_EQ(config.groups[1].spec.block_size, 80);
  EXPECT_EQ(layer.parts[0].rows, 16);
  EXPECT_EQ(layer.parts[0].kernel_blocks, 5);
  const std::int64_t half = 16 * 2 * 16 * 2;
  // Slot 37 is token 5 of kernel block 2.
  EXPECT_EQ(layer.row_begin(BlockId{1}, 1, 37, 0),
            10 * half + 2 * 2 * half + half + 5 * 2 * 16 * 2);
}

TEST(Layout, HNDKeepsTheTokensOfAHeadTogether) {
  const KVCacheConfig config = plan({{"a", full_spec(4, 8)}}, 2);
  const MemoryPlan pool = layout(config, CacheLayout::HND, AttentionBackend::flashinfer);
  const LayerMemory& layer = pool.layers[0];
  EXPECT_EQ(layer.parts[0].row_stride, 8 * 2);
  EXPECT_EQ(layer.parts[0].head_stride, 16 * 8 * 2);
  EXPECT_EQ(layer.regions.size(), 1u);
}

TEST(Layout, ASecondStateStartsWhereTheFirstEndsWhateverItsDtype) {
  const MemoryPlan pool = layout(plan({{"s", states()}, {"a", full_spec(2, 16)}}, 3));
  const LayerMemory& layer = pool.layers[0];
  // Element 8 begins the second row of 8.
  EXPECT_EQ(byte_of(layer.parts[1], {.block = 2, .row = 1}),
            2 * layer.page_bytes() + 3 * 20 * 2 + 8 * 4);
  EXPECT_GT(layer.page_bytes(), bytes_of(layer.parts[0]) + bytes_of(layer.parts[1]));
}

TEST(Layout, LayersOfAPackTakeTheirPlaces) {
  LayerSpecs layers{{"s", states()}, {"t", states()}};
  for (int i = 0; i < 3; ++i) layers.push_back({"a" + std::to_string(i), full_spec(2, 16)});
  const KVCacheConfig config = plan(layers, 4, 2);
  const MemoryPlan nhd = layout(config);
  const MemoryPlan hnd = layout(config, CacheLayout::HND);
  ASSERT_EQ(config.groups.back().layer_names.size(), 3u);
  const auto attention = std::span(nhd.layers).last(3);
  const PartRows& second = attention[1].parts[0];
  const std::int64_t plane = second.rows * 2 * 16 * 2;
  EXPECT_EQ(attention[0].tensor, attention[1].tensor);
  EXPECT_NE(attention[0].tensor, attention[2].tensor);
  EXPECT_EQ(second.offset - attention[1].begin, 2 * plane);
  EXPECT_EQ(second.kernel_block_stride, 2 * 2 * plane);
  // FlashAttention's HND with layers: heads, then layers, then K and V.
  const LayerMemory& by_head = hnd.layers[hnd.layers.size() - 2];
  EXPECT_EQ(by_head.parts[0].offset - by_head.begin, 2 * plane / 2);
  EXPECT_EQ(by_head.parts[0].head_stride, 2 * 2 * plane / 2);
}

TEST(Layout, TheKernelBlockIsTheLargestThatDividesTheBlock) {
  KVCacheGroupSpec group{{"a"}, full_spec(2, 64, 1056), {}, 1};
  const auto size = [&](AttentionBackend backend, bool fp32) {
    return kernel_block_size(group, backend, fp32, 0).value_or(-1);
  };
  EXPECT_EQ(size(AttentionBackend::flash_attn, true), 32);
  EXPECT_EQ(size(AttentionBackend::flash_attn, false), 1056);
  EXPECT_EQ(size(AttentionBackend::flashinfer, false), 32);
  EXPECT_EQ(size(AttentionBackend::triton_attn, true), 1056);
  group.spec.block_size = 24;
  const auto refused = kernel_block_size(group, AttentionBackend::flashinfer, false, 0);
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().message.find("nearest block size that works is 32"), std::string::npos)
      << refused.error().message;
}

TEST(Layout, ASplitPaddedPageHasNoViewAndSaysSo) {
  KVCacheConfig config = plan({{"a", full_spec(2, 64)}}, 2, 1, AttentionBackend::flashinfer);
  KVCacheSpec& spec = config.groups[0].spec;
  spec.block_size = 48;
  spec.page_size_padded = page_size_bytes(spec) + 512;
  config.tensors[0].size_bytes = 2 * *spec.page_size_padded;
  const auto views = pool_views(config, AttentionBackend::flashinfer, CacheLayout::NHD);
  ASSERT_FALSE(views);
  EXPECT_NE(views.error().message.find("cannot be cut into 3"), std::string::npos)
      << views.error().message;
}

TEST(PageSize, ScalesOfPerTokenHeadQuantizationArePartOfThePage) {
  KVCacheSpec spec = full_spec(4, 128, 16);
  spec.dtype = DType::int8;
  spec.kv_quant_mode = KVQuantMode::int8_per_token_head;
  EXPECT_EQ(real_page_size_bytes(spec), 2 * 16 * 4 * 128);
  EXPECT_EQ(page_size_bytes(spec), 2 * 16 * 4 * (128 + 4));
  EXPECT_EQ(row_elements(spec), 132);
  spec.kv_quant_mode = KVQuantMode::nvfp4;
  spec.dtype = DType::uint8;
  EXPECT_EQ(page_size_bytes(spec), 2 * 16 * 4 * (64 + 8));
}

TEST(PageSize, DeepSeekRowsAre656And584Bytes) {
  KVCacheSpec spec = full_spec(1, 576, 64);
  spec.kind = CacheKind::mla;
  EXPECT_EQ(page_size_bytes(spec), 64 * 576 * 2);
  spec.cache_dtype_str = "fp8_ds_mla";
  spec.dtype = DType::uint8;
  EXPECT_EQ(page_size_bytes(spec), 64 * 656);
  spec.model_version = "deepseek_v4";
  spec.block_size = 256;
  spec.tokens_per_state = {4};
  spec.alignment = 576;
  EXPECT_EQ(page_size_bytes(with_alignment_padding(spec)), 37440);  // 64 rows of 584, up to 576
}

class Pages : public testing::TestWithParam<std::tuple<CacheLayout, AttentionBackend, int>> {};

TEST_P(Pages, TheRunsOfABlockCoverItOnce) {
  const auto [order, backend, pack] = GetParam();
  LayerSpecs layers{{"s", states()}};
  for (int i = 0; i < 3; ++i) layers.push_back({"a" + std::to_string(i), full_spec(2, 16)});
  const KVCacheConfig config = plan(layers, 3, pack, backend);
  const MemoryPlan memory = layout(config, order, backend);
  for (std::size_t g = 0; g < config.groups.size(); ++g)
    for (std::size_t t = 0; t < config.tensors.size(); ++t) {
      const auto runs = block_runs(memory, g, t);
      std::int64_t reached = 0;
      std::int64_t used = 0;
      for (const BlockRun& run : runs) {
        EXPECT_EQ(run.begin, reached);
        EXPECT_LT(run.begin, run.end);
        if (run.layer >= 0) used += run.end - run.begin;
        reached = run.end;
      }
      if (runs.empty()) continue;
      EXPECT_EQ(reached, memory.tensor_size_bytes[t] / 3);
      std::int64_t expected = 0;
      for (const LayerMemory* layer : layers_in(memory, g, t))
        expected += unpadded_page_size_bytes(config.groups[g].layer_spec(layer->layer));
      EXPECT_EQ(used, expected);
    }
}

INSTANTIATE_TEST_SUITE_P(Orders, Pages,
                         testing::Combine(testing::Values(CacheLayout::NHD, CacheLayout::HND),
                                          testing::Values(AttentionBackend::flash_attn,
                                                          AttentionBackend::flashinfer),
                                          testing::Values(1, 2)));

}  // namespace
}  // namespace lockstep
