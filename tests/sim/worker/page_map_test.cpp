// Where a worker keeps the bytes of the model's pages: both orders, padding, wrong views.
#include "sim/worker/page_map.h"

#include <gtest/gtest.h>

#include <numeric>

#include "reference/plan/layout.h"

namespace lockstep {
namespace {

constexpr std::int64_t kBlocks = 4, kTokens = 4, kHeads = 2, kRow = 16;
constexpr std::int64_t kPadded = 2 * kTokens * kHeads * kRow + 32;

KVCacheConfig plan_of_one_layer() {
  KVCacheSpec spec;
  spec.kind = CacheKind::full_attention;
  spec.block_size = kTokens;
  spec.num_kv_heads = kHeads;
  spec.head_size = kRow / 2;
  spec.dtype = DType::bf16;
  spec.page_size_padded = kPadded;
  KVCacheConfig plan;
  plan.num_blocks = kBlocks;
  plan.tensors.push_back({.size_bytes = kBlocks * kPadded, .shared_by = {"layers.0"}});
  plan.groups.push_back({.layer_names = {"layers.0"}, .spec = spec});
  return plan;
}

// K and V of a token side by side (LBNHC), or K of the block before its V.
WorkerLayer layer_in(bool side_by_side) {
  WorkerLayer layer{
      .name = "layers.0", .page_offset = 0, .page_stride = kPadded, .parts = {}, .states = {}};
  for (std::int64_t part = 0; part < 2; ++part) {
    const std::int64_t head = side_by_side ? 2 * kRow : kRow;
    layer.parts.push_back({.offset = part * (side_by_side ? kRow : kTokens * kHeads * kRow),
                           .blocks = kBlocks,
                           .tokens = kTokens,
                           .heads = kHeads,
                           .row_bytes = kRow,
                           .block_stride = kPadded,
                           .token_stride = kHeads * head,
                           .head_stride = head});
  }
  return layer;
}

Result<PageMap> map_of(const WorkerLayer& layer, std::string_view order) {
  const KVCacheConfig plan = plan_of_one_layer();
  const auto layout = pool_layout(plan, AttentionBackend::any_size, CacheLayout::NHD);
  EXPECT_TRUE(layout) << layout.error().message;
  return PageMap::create(plan, *layout, std::span(&layer, 1), order, kBlocks * kPadded);
}

TEST(PageMap, FindsEveryRowInBothOrdersAndKeepsThePaddingBehindThem) {
  for (const bool side_by_side : {false, true}) {
    const WorkerLayer layer = layer_in(side_by_side);
    const auto map = map_of(layer, side_by_side ? "LBNHC" : "");
    ASSERT_TRUE(map) << map.error().message;
    ASSERT_TRUE(map->findings().empty()) << map->findings().front();
    std::vector<std::uint8_t> page(kPadded), memory(kBlocks * kPadded), back(kPadded);
    std::iota(page.begin(), page.end(), std::uint8_t{1});
    map->scatter(memory, 0, BlockId{2}, 0, page);
    for (std::int64_t part = 0; part < 2; ++part)
      for (std::int64_t slot = 0; slot < kTokens; ++slot)
        for (std::int64_t head = 0; head < kHeads; ++head) {
          const std::int64_t in_page = ((part * kTokens + slot) * kHeads + head) * kRow;
          const std::int64_t at = PageMap::row_offset(layer, BlockId{2}, part, slot, head);
          EXPECT_EQ(memory[at], page[in_page]) << part << slot << head;
        }
    EXPECT_EQ(memory[3 * kPadded - 1], page.back());
    map->gather(memory, 0, BlockId{2}, 0, back);
    EXPECT_EQ(back, page);
    EXPECT_EQ(memory[0], 0);
  }
}

// Two layers of the same group; a layer's page follows the previous layer's, or the previous block
// of all layers.
TEST(PageMap, FindsRowsByHeadsAndBlocksBeforeLayers) {
  KVCacheConfig plan = plan_of_one_layer();
  plan.tensors.push_back({.size_bytes = kBlocks * kPadded, .shared_by = {"layers.1"}});
  plan.groups.front().layer_names.push_back("layers.1");
  const auto layout = pool_layout(plan, AttentionBackend::any_size, CacheLayout::NHD);
  ASSERT_TRUE(layout) << layout.error().message;
  for (const std::string_view order : {"LBNHC", "LBHNC", "BLNHC", "BLHNC"}) {
    const bool by_heads = order.ends_with("HNC"), by_blocks = order.starts_with('B');
    std::vector<WorkerLayer> layers(2, layer_in(true));
    for (std::int64_t l = 0; l < 2; ++l) {
      WorkerLayer& layer = layers[l];
      layer.name = plan.groups.front().layer_names[l];
      layer.page_stride = by_blocks ? 2 * kPadded : kPadded;
      layer.page_offset = l * (by_blocks ? kPadded : kBlocks * kPadded);
      for (WorkerView& part : layer.parts) {
        part.offset += layer.page_offset;
        part.block_stride = layer.page_stride;
        if (by_heads) part.token_stride = 2 * kRow;
        if (by_heads) part.head_stride = kTokens * 2 * kRow;
      }
    }
    const auto map = PageMap::create(plan, *layout, layers, order, 2 * kBlocks * kPadded);
    ASSERT_TRUE(map) << map.error().message;
    ASSERT_TRUE(map->findings().empty()) << order << ": " << map->findings().front();
    std::vector<std::uint8_t> page(kPadded), memory(2 * kBlocks * kPadded), back(kPadded);
    std::iota(page.begin(), page.end(), std::uint8_t{1});
    map->scatter(memory, 1, BlockId{3}, 0, page);
    const std::int64_t in_page = ((1 * kTokens + 2) * kHeads + 1) * kRow;
    EXPECT_EQ(memory[PageMap::row_offset(layers[1], BlockId{3}, 1, 2, 1)], page[in_page]) << order;
    EXPECT_EQ(memory.back(), page.back()) << order;  // the last page of the memory, in both
    map->gather(memory, 1, BlockId{3}, 0, back);
    EXPECT_EQ(back, page) << order;
    const std::string_view other = by_heads ? "LBNHC" : "LBHNC";
    if (by_blocks) continue;
    const auto wrong = PageMap::create(plan, *layout, layers, other, 2 * kBlocks * kPadded);
    ASSERT_TRUE(wrong) << wrong.error().message;
    EXPECT_FALSE(wrong->findings().empty()) << order;
  }
}

// Blocks of four tokens in kernel blocks of two: each of them has the order of a whole block.
WorkerLayer split_layer(bool side_by_side, bool by_heads) {
  WorkerLayer layer = layer_in(side_by_side);
  layer.page_stride = kPadded - 32;
  for (std::int64_t part = 0; part < 2; ++part) {
    WorkerView& view = layer.parts[part];
    view.kernel_blocks = 2;
    view.blocks *= 2;
    view.tokens /= 2;
    view.block_stride = layer.page_stride / 2;
    if (!side_by_side) view.offset = part * 2 * kHeads * kRow;
    if (by_heads) view.token_stride = 2 * kRow;
    if (by_heads) view.head_stride = 2 * 2 * kRow;
  }
  return layer;
}

TEST(PageMap, FindsEveryRowOfKernelBlocks) {
  KVCacheConfig plan = plan_of_one_layer();
  plan.groups.front().spec.page_size_padded.reset();
  constexpr std::int64_t kPage = kPadded - 32;
  plan.tensors.front().size_bytes = kBlocks * kPage;
  const auto layout = pool_layout(plan, AttentionBackend::any_size, CacheLayout::NHD);
  ASSERT_TRUE(layout) << layout.error().message;
  for (const std::string_view order : {"", "LBNHC", "LBHNC"}) {
    const WorkerLayer layer = split_layer(!order.empty(), order.ends_with("HNC"));
    const auto map_of_layer = [&](const WorkerLayer& made) {
      return PageMap::create(plan, *layout, std::span(&made, 1), order, kBlocks * kPage);
    };
    const auto map = map_of_layer(layer);
    ASSERT_TRUE(map) << map.error().message;
    ASSERT_TRUE(map->findings().empty()) << order << ": " << map->findings().front();
    std::vector<std::uint8_t> page(kPage), memory(kBlocks * kPage), back(kPage);
    std::iota(page.begin(), page.end(), std::uint8_t{1});
    map->scatter(memory, 0, BlockId{2}, 0, page);
    // V of head 1 of slot 3: in the second kernel block.
    const std::int64_t in_page = ((1 * kTokens + 3) * kHeads + 1) * kRow;
    const std::int64_t at = PageMap::row_offset(layer, BlockId{2}, 1, 3, 1);
    EXPECT_EQ(at, 2 * kPage + kPage / 2 + kPage / 2 - kRow) << order;  // the last row of the page
    EXPECT_EQ(memory[at], page[in_page]) << order;
    map->gather(memory, 0, BlockId{2}, 0, back);
    EXPECT_EQ(back, page) << order;
    WorkerLayer whole = layer;  // kernel blocks as far apart as blocks
    for (WorkerView& view : whole.parts) view.block_stride *= 2;
    EXPECT_FALSE(map_of_layer(whole)->findings().empty()) << order;
    WorkerLayer fewer = layer;
    for (WorkerView& view : fewer.parts) view.blocks /= 2;
    EXPECT_FALSE(map_of_layer(fewer)->findings().empty()) << order;
  }
}

TEST(PageMap, FindsRowsWhereKOfAllBlocksIsBeforeV) {
  KVCacheConfig plan = plan_of_one_layer();
  plan.groups.front().spec.page_size_padded.reset();
  constexpr std::int64_t kPage = kPadded - 32, kHalf = kPage / 2;
  plan.tensors.front().size_bytes = kBlocks * kPage;
  const auto layout = pool_layout(plan, AttentionBackend::any_size, CacheLayout::NHD);
  ASSERT_TRUE(layout) << layout.error().message;
  for (const std::int64_t parts : {1, 2}) {  // kernel blocks per block
    WorkerLayer layer = layer_in(false);
    layer.page_stride = kPage;
    for (std::int64_t part = 0; part < 2; ++part) {
      WorkerView& view = layer.parts[part];
      view.offset = part * kBlocks * kHalf;
      view.kernel_blocks = parts;
      view.blocks *= parts;
      view.tokens /= parts;
      view.block_stride = kHalf / parts;
    }
    const auto map_of_layer = [&](const WorkerLayer& made) {
      return PageMap::create(plan, *layout, std::span(&made, 1), "", kBlocks * kPage);
    };
    const auto map = map_of_layer(layer);
    ASSERT_TRUE(map) << map.error().message;
    ASSERT_TRUE(map->findings().empty()) << map->findings().front();
    std::vector<std::uint8_t> page(kPage), memory(kBlocks * kPage), back(kPage);
    std::iota(page.begin(), page.end(), std::uint8_t{1});
    for (const std::int32_t group : {-1, 0}) {  // allocated to none, to the layer's
      std::ranges::fill(memory, std::uint8_t{0});
      map->scatter(memory, 0, BlockId{2}, group, page);
      EXPECT_TRUE(std::equal(page.begin(), page.begin() + kHalf, memory.begin() + 2 * kHalf));
      EXPECT_TRUE(
          std::equal(page.begin() + kHalf, page.end(), memory.begin() + (kBlocks + 2) * kHalf));
      EXPECT_EQ(memory[3 * kHalf], 0);
      map->gather(memory, 0, BlockId{2}, group, back);
      EXPECT_EQ(back, page);
    }
    WorkerLayer early = layer;  // V of the last block ends where the memory does
    early.parts[1].offset -= kHalf;
    EXPECT_FALSE(map_of_layer(early)->findings().empty());
  }
}

TEST(PageMap, FindsViewsThatAreNotTheModels) {
  WorkerLayer swapped = layer_in(false);
  std::swap(swapped.parts[0], swapped.parts[1]);
  WorkerLayer early = layer_in(false);
  early.parts[0].block_stride = kPadded / 2;
  WorkerLayer strided = layer_in(true);
  strided.parts[1].head_stride = kRow;
  WorkerLayer far = layer_in(false);
  far.page_offset = kPadded;
  for (const auto& [layer, order] :
       {std::pair{swapped, ""}, {early, ""}, {strided, "LBNHC"}, {far, ""}}) {
    const auto map = map_of(layer, order);
    ASSERT_TRUE(map) << map.error().message;
    EXPECT_FALSE(map->findings().empty());
  }
}

TEST(PageMap, RefusesWhatItCannotLayOut) {
  WorkerLayer larger = layer_in(false);
  larger.page_stride = 2 * kPadded;
  EXPECT_FALSE(map_of(larger, ""));
  EXPECT_FALSE(map_of(layer_in(false), "BHLNC"));
}

// Two states of 24 and 64 bytes in a padded page.
KVCacheConfig plan_of_states() {
  KVCacheConfig plan = plan_of_one_layer();
  KVCacheSpec& spec = plan.groups.front().spec;
  spec = {};
  spec.kind = CacheKind::mamba;
  spec.block_size = kTokens;
  spec.states = {{.dims = {3, 4}, .dtype = DType::bf16}, {.dims = {2, 8}, .dtype = DType::fp32}};
  spec.page_size_padded = kPadded;
  return plan;
}

WorkerLayer layer_of_states() {
  WorkerLayer layer{
      .name = "layers.0", .page_offset = 0, .page_stride = kPadded, .parts = {}, .states = {}};
  layer.states = {{.offset = 0, .blocks = kBlocks, .bytes = 24, .block_stride = kPadded},
                  {.offset = 24, .blocks = kBlocks, .bytes = 64, .block_stride = kPadded}};
  return layer;
}

Result<PageMap> map_of_states(const WorkerLayer& layer) {
  const KVCacheConfig plan = plan_of_states();
  const auto layout = pool_layout(plan, AttentionBackend::any_size, CacheLayout::NHD);
  EXPECT_TRUE(layout) << layout.error().message;
  return PageMap::create(plan, *layout, std::span(&layer, 1), "LBNHC", kBlocks * kPadded);
}

TEST(PageMap, LeavesStatesWhereTheModelHasThem) {
  const auto map = map_of_states(layer_of_states());
  ASSERT_TRUE(map) << map.error().message;
  ASSERT_TRUE(map->findings().empty()) << map->findings().front();
  std::vector<std::uint8_t> page(kPadded), memory(kBlocks * kPadded);
  std::iota(page.begin(), page.end(), std::uint8_t{1});
  map->scatter(memory, 0, BlockId{1}, 0, page);
  EXPECT_TRUE(std::equal(page.begin(), page.end(), memory.begin() + kPadded));
  EXPECT_TRUE(map->used_bytes(0, 0)[87]);
  EXPECT_FALSE(map->used_bytes(0, 0)[88]);
}

TEST(PageMap, FindsStatesThatAreNotWhereTheModelHasThem) {
  for (const auto& [of, wrong] : {std::pair{&WorkerState::offset, 32},
                                  {&WorkerState::bytes, 56},
                                  {&WorkerState::blocks, 3},
                                  {&WorkerState::block_stride, 88}}) {
    WorkerLayer layer = layer_of_states();
    layer.states[1].*of = wrong;
    const auto map = map_of_states(layer);
    ASSERT_TRUE(map) << map.error().message;
    ASSERT_EQ(map->findings().size(), 1u) << wrong;
    EXPECT_NE(map->findings().front().find("state 1"), std::string::npos);
  }
  WorkerLayer one = layer_of_states();
  one.states.pop_back();
  EXPECT_FALSE(map_of_states(one));
}

}  // namespace
}  // namespace lockstep
