// The stages of a plan whose groups overlay one allocation, each by its own numbers.
#include "reference/placement/placement.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "reference/placement/worker_pages.h"

namespace lockstep {
namespace {

KVCacheSpec cache_rows(CacheKind type, std::int64_t block_size, std::int64_t heads,
                       std::int64_t head_size) {
  KVCacheSpec spec;
  spec.kind = type;
  spec.block_size = block_size;
  spec.num_kv_heads = heads;
  spec.head_size = head_size;
  spec.head_size_v = is_mla(type) || type == CacheKind::sliding_window_mla ? 0 : head_size;
  spec.dcp_sharded = true;
  if (is_sliding_window(type)) spec.sliding_window = 128;
  return spec;
}

LayerSpecs cache_layers(const std::vector<KVCacheSpec>& specs) {
  LayerSpecs named;
  for (const KVCacheSpec& spec : specs)
    named.push_back({"layers." + std::to_string(named.size()) + ".attn", spec});
  return named;
}

PlacementOptions placement_options(std::int64_t memory_bytes = std::int64_t{1} << 30) {
  PlacementOptions options;
  options.memory_bytes = memory_bytes;
  options.max_model_len = 4096;
  return options;
}

TEST(CacheSpecs, APageIsHeadsTimesRowsTimesContent) {
  const KVCacheSpec full = cache_rows(CacheKind::full_attention, 16, 8, 128);
  EXPECT_EQ(page_bytes(full), 8 * 16 * 512);
  KVCacheSpec compressed = cache_rows(CacheKind::mla, 256, 1, 512);
  compressed.tokens_per_state = {4};
  EXPECT_EQ(rows_of(compressed, 256), 64);
  EXPECT_EQ(page_bytes(compressed), 64 * 1024);
  compressed.plan.state_content_bytes = 584;
  compressed.alignment = 576;
  apply_alignment(compressed);
  EXPECT_EQ(unpadded_page_bytes(compressed), 37376);
  EXPECT_EQ(page_bytes(compressed), 37440);
}

TEST(CacheSpecs, WholeKernelBlocksAlignTheStrideOnlyWhenABlockHoldsSeveral) {
  KVCacheSpec spec = cache_rows(CacheKind::full_attention, 64, 2, 64);
  spec.plan.stride_kernel_tokens = 64;
  EXPECT_EQ(stride_alignment_bytes(spec), 1);
  spec.block_size = 256;
  EXPECT_EQ(stride_alignment_bytes(spec), 64 * 2 * 256);
}

TEST(CacheSpecs, APaddedPageThatNeedsNoPaddingInASmallerBlockKeepsTheOldOne) {
  KVCacheSpec spec = cache_rows(CacheKind::mla, 72, 1, 132);
  spec.dtype = DType::uint8;
  spec.alignment = 512;
  apply_alignment(spec);
  EXPECT_EQ(page_bytes(spec), 9728);
  EXPECT_EQ(page_bytes(with_block_size(spec, 128)), 9728);  // 128 * 132 is a multiple of 512
}

TEST(CacheSpecs, MergingRowsOfMLADropsAlignmentAndUnlikeClassesDoNotMerge) {
  KVCacheSpec latent = cache_rows(CacheKind::mla, 64, 1, 576);
  latent.alignment = 512;
  const auto merged = merge_specs(cache_layers({latent, latent}));
  ASSERT_TRUE(merged && *merged);
  EXPECT_EQ((*merged)->alignment, 0);
  const KVCacheSpec full = cache_rows(CacheKind::full_attention, 64, 1, 576),
                    sink = cache_rows(CacheKind::sink_full, 64, 1, 576);
  EXPECT_FALSE(merge_specs(cache_layers({full, latent})).value());
  EXPECT_EQ((*merge_specs(cache_layers({full, sink})))->kind, CacheKind::full_attention);
}

TEST(CacheOrders, EveryOrderNestsItsDimensionsAsItsNameSays) {
  const KVCacheSpec spec =
      cache_rows(CacheKind::full_attention, 16, 2, 64);  // [.., H 2, N 16, C 256]
  for (const CacheLayout order : kOverlaidLayouts) {
    const auto strides = order_strides(spec, 3, 5, order);
    ASSERT_TRUE(strides);
    const std::int64_t of[] = {strides->layer, strides->block, strides->head, strides->row, 1};
    const std::int64_t sizes[] = {5, 3, 2, 16, 256};
    std::int64_t expected = 1;
    for (int i = 4; i >= 0; --i) {
      const auto d = std::string_view("LBHNC").find(name_of(order)[static_cast<std::size_t>(i)]);
      EXPECT_EQ(of[d], expected) << name_of(order) << " dimension " << d;
      expected *= sizes[d];
    }
  }
}

TEST(CacheOrders, PaddedPagesNeedHeadsAndRowsInsideLayersAndBlocks) {
  KVCacheSpec spec = cache_rows(CacheKind::full_attention, 16, 2, 64);
  spec.page_size_padded = 9216;
  EXPECT_EQ(order_strides(spec, 3, 5, CacheLayout::LBNHC)->block, 9216);
  EXPECT_EQ(order_strides(spec, 3, 5, CacheLayout::BLHNC)->layer, 9216);
  EXPECT_FALSE(order_strides(spec, 3, 5, CacheLayout::LHBNC));
  EXPECT_FALSE(order_strides(spec, 3, 5, CacheLayout::BHLNC));
}

TEST(CacheOrders, UnlikeListsAreIntersectedAndUnlikePagesNeedCompactBlocks) {
  using enum CacheLayout;
  EXPECT_EQ(*supported_orders({{BLHNC, BLNHC}, {}, {BLNHC, BLHNC}, {BLNHC, BLHNC}}),
            (std::vector{BLNHC, BLHNC}));
  EXPECT_FALSE(supported_orders({{LBNHC}, {LBHNC}}));
  const auto all = *supported_orders({});
  const auto mixed = cache_layers({cache_rows(CacheKind::full_attention, 16, 2, 64),
                                   cache_rows(CacheKind::full_attention, 16, 4, 64)});
  EXPECT_FALSE(choose_order(all, false, mixed, "LHBNC", {}));
  EXPECT_EQ(choose_order(all, false, mixed, "HND", {})->order, LBHNC);
  EXPECT_EQ(choose_order(all, false, mixed, {}, BHLNC)->by, "default");
}

TEST(CacheGroups, UnlikeWindowsAreDealtOutInGroupsOfTheFewestLayers) {
  std::vector<KVCacheSpec> specs;
  for (int i = 0; i < 12; ++i)
    specs.push_back(
        cache_rows(i % 4 == 3 ? CacheKind::full_attention : CacheKind::sliding_window, 16, 2, 64));
  const auto groups = cache_groups(cache_layers(specs), CacheLayout::LBNHC, placement_options());
  ASSERT_TRUE(groups);
  ASSERT_EQ(groups->size(), 4u);
  EXPECT_EQ((*groups)[0].layer_names,
            (std::vector<std::string>{"layers.0.attn", "layers.4.attn", "layers.8.attn"}));
}

TEST(CacheGroups, PackingKeepsAPatternOfUnlikePagesTogether) {
  std::vector<KVCacheSpec> specs;
  for (int i = 0; i < 6; ++i) {
    specs.push_back(cache_rows(CacheKind::mla, 64, 1, 576));
    specs.push_back(cache_rows(CacheKind::mla, 64, 1, 128));
    specs.push_back(cache_rows(CacheKind::sliding_window, 64, 1, 64));
  }
  const auto groups = cache_groups(cache_layers(specs), CacheLayout::BLHNC, placement_options());
  ASSERT_TRUE(groups);
  ASSERT_EQ(groups->size(), 2u);
  EXPECT_EQ((*groups)[0].layer_names.size(), 12u);
  EXPECT_EQ(bytes_per_block(*groups, CacheLayout::BLHNC), 6 * 64 * (1152 + 256));
}

TEST(CacheGroups, WindowsOfUnlikePagesInUnlikeNumbersCannotBeSplit) {
  std::vector<KVCacheSpec> specs(12, cache_rows(CacheKind::sliding_window, 16, 8, 256));
  specs.push_back(cache_rows(CacheKind::full_attention, 16, 2, 128));
  specs.push_back(cache_rows(CacheKind::sliding_window, 16, 1, 128));  // a drafter's
  const auto refused = cache_groups(cache_layers(specs), CacheLayout::BLHNC, placement_options());
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().message.find("layers outermost"), std::string::npos);
  // Finding 24: with these the engine stops, or leaves a layer without a group.
  const auto beside_full = [](std::vector<std::int64_t> heads_of_windows) {
    std::vector<KVCacheSpec> layers = {cache_rows(CacheKind::full_attention, 16, 1, 64)};
    for (const std::int64_t heads : heads_of_windows)
      layers.push_back(cache_rows(CacheKind::sliding_window, 16, heads, 64));
    return cache_layers(layers);
  };
  for (const std::vector<std::int64_t>& heads :
       {std::vector<std::int64_t>{2, 2, 1}, {1, 1, 1, 1, 2, 2, 2}}) {
    EXPECT_FALSE(cache_groups(beside_full(heads), CacheLayout::BLHNC, placement_options()));
    EXPECT_TRUE(cache_groups(beside_full(heads), CacheLayout::LBHNC, placement_options()));
  }
  EXPECT_TRUE(cache_groups(beside_full({2, 1}), CacheLayout::BLHNC, placement_options()));
  EXPECT_TRUE(cache_groups(beside_full({1, 2, 2}), CacheLayout::BLHNC, placement_options()));
}

TEST(CacheGroups, RowsOfMLABesidePagesThatTheyDoNotDivideAreRefused) {
  KVCacheSpec states;
  states.kind = CacheKind::mamba;
  states.states = {{{100000}, DType::fp32}};
  const auto layers = cache_layers({states, cache_rows(CacheKind::mla, 64, 1, 576)});
  EXPECT_FALSE(cache_groups(layers, CacheLayout::LBNHC, placement_options()));
  EXPECT_TRUE(cache_groups(layers, CacheLayout::BLNHC, placement_options()));
}

TEST(Placements, ARequestOfTheLongestLengthAndTheNullBlockMustFit) {
  const auto groups =
      *cache_groups(cache_layers({cache_rows(CacheKind::full_attention, 16, 2, 64)}),
                    CacheLayout::LBNHC, placement_options());
  const std::int64_t block = 16 * 2 * 256, needed = (4096 / 16 + 1) * block;
  const auto plan_in = [&](std::int64_t memory) {
    return place_workers(groups, CacheLayout::LBNHC, {{{"layers.0.attn"}, memory}},
                         placement_options(memory));
  };
  ASSERT_TRUE(plan_in(needed));
  EXPECT_EQ(plan_in(needed)->front().num_blocks, 257);
  const auto refused = plan_in(needed - 1);
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().message.find("max_model_len 4080"), std::string::npos)
      << refused.error().message;
}

TEST(Placements, StagesOfAPipelineShareTheSmallestPool) {
  const auto layers =
      cache_layers(std::vector<KVCacheSpec>(4, cache_rows(CacheKind::full_attention, 16, 2, 64)));
  const auto groups = *cache_groups(layers, CacheLayout::BLHNC, placement_options());
  const auto plans = place_workers(groups, CacheLayout::BLHNC,
                                   {{{"layers.0.attn"}, 1 << 25},
                                    {{"layers.1.attn", "layers.2.attn", "layers.3.attn"}, 1 << 25}},
                                   placement_options());
  ASSERT_TRUE(plans);
  EXPECT_EQ((*plans)[0].num_blocks, (1 << 25) / (3 * 8192));
  EXPECT_EQ((*plans)[0].tensors[0].block_stride, 8192);
  EXPECT_EQ((*plans)[1].tensors[0].block_stride, 3 * 8192);
}

TEST(LayerSpecs, TheAttentionPageGrowsUntilItHoldsTheStates) {
  PlacementLayer states{"layers.0.linear", KVCacheSpec{}, "gdn", false};
  states.spec->kind = CacheKind::mamba;
  states.spec->states = {{{3, 8192}, DType::bf16}, {{32, 128, 128}, DType::fp32}};
  const PlacementLayer attention{"layers.1.attn", cache_rows(CacheKind::full_attention, 1, 2, 256),
                                 "flash_attn", false};
  PlacementOptions options = placement_options();
  options.mamba_cache_mode = MambaCacheMode::align;
  const auto alignment = align_blocks({states, attention}, options);
  ASSERT_TRUE(alignment);
  EXPECT_EQ(alignment->block_size, 1056);
  EXPECT_EQ(alignment->mamba_page_size_padded, 2162688);
  EXPECT_EQ(alignment->mamba_block_size, 1056);
}

TEST(LayerSpecs, BackendsPackRowsInTheirOwnWays) {
  KVCacheSpec spec = cache_rows(CacheKind::full_attention, 16, 8, 128);
  spec.dtype = DType::uint8;
  spec.kv_quant_mode = KVQuantMode::nvfp4;
  const auto none = DeviceFamily::none;
  const KVCacheSpec fp4 = customized(*find_cache_backend("flashinfer"), none, spec);
  EXPECT_EQ(num_heads(fp4), 16);
  EXPECT_EQ(content_bytes(fp4), 72);
  spec.kv_quant_mode = KVQuantMode::int4_per_token_head;
  EXPECT_EQ(content_bytes(customized(*find_cache_backend("triton_attn"), none, spec)), 136);
  spec.kv_quant_mode = KVQuantMode::turboquant_k8v4;
  EXPECT_EQ(content_bytes(customized(*find_cache_backend("turboquant"), none, spec)), 196);
  KVCacheSpec latent = cache_rows(CacheKind::mla, 64, 1, 576);
  EXPECT_EQ(
      customized(*find_cache_backend("flashinfer_mla_sparse"), none, latent).block_stride_alignment,
      32 * 1152);
}

std::vector<PlacementLayer> on_backend(const LayerSpecs& specs, const std::string& backend) {
  std::vector<PlacementLayer> layers;
  for (const NamedSpec& layer : specs) layers.push_back({layer.name, layer.spec, backend, false});
  return layers;
}

TEST(LayerSpecs, Nvfp4NeedsKAndVOfEqualSize) {
  PlacementLayer layer{"layers.0.attn", cache_rows(CacheKind::full_attention, 1, 2, 128),
                       "flashinfer"};
  PlacementOptions options = placement_options();
  options.format = "nvfp4";
  const BlockAlignment alignment{16, 4096, {}, {}};
  EXPECT_TRUE(layers_with_specs({layer}, alignment, options));
  layer.spec->head_size_v = 64;
  const auto refused = layers_with_specs({layer}, alignment, options);
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().message.find("128 and 64 elements"), std::string::npos);
}

TEST(LayerSpecs, GatedDeltaNetsAlignBlocksToTheirChunkAndNotToTheirGrid) {
  KVCacheSpec state;
  state.kind = CacheKind::mamba;
  state.states = {{{32, 128, 128}, DType::fp32}};  // 2 MiB
  state.prefill_checkpoint_alignment = 192;
  const PlacementLayer gated{"layers.0.linear", state, "gdn"};
  const PlacementLayer attention{"layers.1.attn", cache_rows(CacheKind::full_attention, 1, 2, 256),
                                 "flash_attn"};
  PlacementOptions options = placement_options();
  options.mamba_cache_mode = MambaCacheMode::align;
  options.prefix_match_unit = 48;
  const auto alignment = align_blocks({gated, attention}, options);
  ASSERT_TRUE(alignment);
  EXPECT_EQ(alignment->block_size, 1024);  // 1,152 would be a multiple of 192
  const auto layers = layers_with_specs({gated, attention}, *alignment, options);
  ASSERT_TRUE(layers);
  EXPECT_EQ((*layers)[0].spec->prefill_checkpoint_alignment, 192);  // lcm(48, 64)
}

TEST(LayerSpecs, APooledIndexerTakesBlocksOfWholePools) {
  KVCacheSpec keys = cache_rows(CacheKind::mla, 1, 1, 132);
  keys.tokens_per_state = {16};
  const PlacementLayer indexer{"layers.0.indexer", keys, "indexer_kpool"};
  const auto alignment = align_blocks({indexer}, placement_options());
  ASSERT_TRUE(alignment);
  EXPECT_EQ(alignment->block_size, 512);  // 32 KV entries of 16 tokens
}

TEST(PlanStages, ABlockWithoutAKVEntryIsRefusedWhereTheEngineDividesByItsPage) {
  KVCacheSpec compressed = cache_rows(CacheKind::mla, 64, 1, 512);
  compressed.tokens_per_state = {128};
  const PlacementLayer empty{"layers.0.attn", compressed, "v4_flashmla"};
  const PlacementLayer full{"layers.1.attn", cache_rows(CacheKind::full_attention, 48, 1, 64),
                            "triton_attn"};
  const PlacementOptions options = placement_options();
  const auto stage_of = [&](const std::vector<PlacementLayer>& layers) {
    std::vector<std::string> names;
    for (const PlacementLayer& layer : layers) names.push_back(layer.name);
    const PlacementStages plan =
        plan_stages(layers, true, {{names, options.memory_bytes}}, options);
    EXPECT_TRUE(plan.order) << "the layout is chosen first";
    EXPECT_NE(plan.refused.message.find("layers.0.attn"), std::string::npos);
    return plan.refused_stage;
  };
  EXPECT_EQ(stage_of({empty}), "plan");
  EXPECT_EQ(stage_of({empty, full}), "groups");  // pages are made equal
}

TEST(PlanStages, AKernelBlockWithoutAKVEntryHasNoStride) {
  KVCacheSpec spec = cache_rows(CacheKind::mla, 192, 1, 512);
  spec.tokens_per_state = {128};
  spec.plan.stride_kernel_tokens = 64;
  EXPECT_EQ(stride_alignment_bytes(spec), 0);
  const PlacementOptions options = placement_options();
  const PlacementStages plan = plan_stages({{"layers.0.attn", spec, "triton_mla"}}, true,
                                           {{{"layers.0.attn"}, options.memory_bytes}}, options);
  EXPECT_EQ(plan.refused_stage, "plan");
}

TEST(WorkerPages, DenseBlocksSplitIntoKernelBlocksAndPackedOnesAreRefused) {
  const auto specs =
      cache_layers(std::vector<KVCacheSpec>(2, cache_rows(CacheKind::full_attention, 128, 2, 64)));
  const auto layers = on_backend(specs, "flashinfer");
  for (const CacheLayout order : {CacheLayout::LBNHC, CacheLayout::BLHNC}) {
    const auto groups = *cache_groups(specs, order, placement_options());
    const auto plan = *place_blocks(groups, order, 3, placement_options());
    const auto pages = worker_pages(plan, layers, placement_options());
    EXPECT_EQ(pages.has_value(), order == CacheLayout::LBNHC);
    if (!pages) continue;
    EXPECT_EQ(pages->kernel_block_sizes, std::vector<std::int64_t>{64});
    EXPECT_EQ(pages->layers[1].page.blocks, 6);
    EXPECT_EQ(zero_segments(*pages)->size(), 4u);
  }
}

TEST(WorkerPages, CompressedRowsOfPackedBlocksGetAMappedTable) {
  KVCacheSpec compressed = cache_rows(CacheKind::mla, 512, 1, 128);
  compressed.tokens_per_state = {4};
  auto specs = cache_layers({compressed, cache_rows(CacheKind::mla, 512, 1, 576)});
  auto layers = on_backend(specs, "triton_mla");
  layers[0].backend = "indexer_v4";
  const auto groups = *cache_groups(specs, CacheLayout::BLHNC, placement_options());
  const auto plan = *place_blocks(groups, CacheLayout::BLHNC, 2, placement_options());
  const auto pages = worker_pages(plan, layers, placement_options());
  ASSERT_TRUE(pages) << pages.error().message;
  ASSERT_EQ(pages->kernel_block_groups.size(), 1u);
  const std::int64_t stride = plan.tensors[0].block_stride / (64 * 256);
  EXPECT_EQ(pages->kernel_block_groups[0].kernel_block_stride, stride);
  EXPECT_EQ(pages->layers[0].bound.blocks, stride + 2);
}

TEST(WorkerPages, ACopyLosesTheTailOfRowsBehindAShorterState) {
  KVCacheSpec states;
  states.kind = CacheKind::mamba;
  states.states = {{{1000}, DType::fp32}};
  states.page_size_padded = 8192;
  const auto specs = cache_layers({states, cache_rows(CacheKind::full_attention, 16, 2, 64)});
  auto layers = on_backend(specs, "triton_attn");
  layers[0].backend = "gdn";
  for (const CacheLayout order : {CacheLayout::LBNHC, CacheLayout::BLNHC}) {
    const auto groups = *cache_groups(specs, order, placement_options());
    const auto plan = *place_blocks(groups, order, 3, placement_options());
    const auto pages = worker_pages(plan, layers, placement_options());
    ASSERT_TRUE(pages) << pages.error().message;
    const auto lost = lost_in_copies(*pages, false);
    // One layer a group: the block spans the allocation and is copied whole.
    EXPECT_TRUE(lost.empty());
  }
  auto more = cache_layers({states, cache_rows(CacheKind::full_attention, 16, 2, 64), states,
                            cache_rows(CacheKind::full_attention, 16, 2, 64)});
  auto all = on_backend(more, "triton_attn");
  all[0].backend = all[2].backend = "gdn";
  const auto groups = *cache_groups(more, CacheLayout::LBNHC, placement_options());
  const auto plan = *place_blocks(groups, CacheLayout::LBNHC, 3, placement_options());
  const auto lost = lost_in_copies(*worker_pages(plan, all, placement_options()), false);
  ASSERT_EQ(lost.size(), 1u);
  EXPECT_EQ(lost[0].bytes, 8192 - 4000);
  EXPECT_EQ(lost[0].layers, 2);
}

TEST(HashSizes, AUnitOfPrefixesMustDivideEveryBlock) {
  const auto groups =
      *cache_groups(cache_layers({cache_rows(CacheKind::full_attention, 32, 2, 64),
                                  cache_rows(CacheKind::sliding_window, 16, 4, 64)}),
                    CacheLayout::LBNHC, placement_options());
  auto options = placement_options();
  const auto plan = *place_blocks(groups, CacheLayout::LBNHC, 10, options);
  EXPECT_EQ(hash_sizes(plan, options)->scheduler_block_size, 32);
  EXPECT_EQ(hash_sizes(plan, options)->hash_block_size, 16);
  options.prefix_match_unit = 24;
  EXPECT_FALSE(hash_sizes(plan, options));
}

}  // namespace
}  // namespace lockstep
