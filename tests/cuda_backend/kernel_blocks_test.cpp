// What works on whole blocks: zeroing, copying, poisoning, fingerprints and state updates against
// loops over bytes, on aligned and misaligned regions.
#include <gtest/gtest.h>

#include "cuda_backend/pool/block_waves.h"
#include "tests/cuda_backend/kernel_device.h"
#include "tests/cuda_backend/protocol_oracle.h"

namespace lockstep::cuda {
namespace {

std::int32_t widest(std::int64_t a, std::int64_t b, std::int64_t c) {
  for (std::int32_t unit : {16, 8, 4, 2})
    if (a % unit == 0 && b % unit == 0 && c % unit == 0) return unit;
  return 1;
}

struct RegionShape {
  int page_bytes, offset, size, num_blocks;
};
const RegionShape kRegionShapes[] = {
    {4096, 0, 4096, 5},      // whole pages
    {4096, 1024, 2048, 5},   // a part, aligned
    {200, 8, 120, 7},        // eight-byte units
    {44, 4, 36, 7},          // four-byte units
    {21, 5, 13, 9},          // bytes
    {262144, 0, 200000, 3},  // several CTAs share a region
};

oracle::Bytes background(std::size_t size) {
  oracle::Bytes bytes(size);
  for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::uint8_t>(number(3, i));
  return bytes;
}

class RegionTest : public ::testing::TestWithParam<RegionShape> {
 protected:
  RegionShape shape = GetParam();
  std::size_t total() const { return std::size_t(shape.page_bytes) * shape.num_blocks; }
  BlockRegion region(std::byte* tensor) const {
    return {.base = tensor + shape.offset,
            .block_stride = shape.page_bytes,
            .size_bytes = shape.size,
            .tensor_offset = shape.offset,
            .tensor = 2,
            .unit_bytes = widest(shape.page_bytes, shape.offset, shape.size)};
  }
  BlockRegion page(std::byte* tensor) const {
    return {.base = tensor,
            .block_stride = shape.page_bytes,
            .size_bytes = shape.page_bytes,
            .tensor_offset = 0,
            .tensor = 2,
            .unit_bytes = widest(shape.page_bytes, 0, 0)};
  }
};
INSTANTIATE_TEST_SUITE_P(Shapes, RegionTest, ::testing::ValuesIn(kRegionShapes));

TEST_P(RegionTest, ZeroAndCopyTouchTheirRegionOfTheirBlocksAndNothingElse) {
  in_every_mode([&](CheckMode mode, std::uint64_t seed) {
    KernelDevice device(mode, seed);
    oracle::Bytes expected = background(total());
    auto* tensor = reinterpret_cast<std::byte*>(device.put(expected, "tensor"));
    const auto* regions = device.put(std::vector<BlockRegion>{region(tensor)}, "regions");
    const auto* groups = device.put(std::vector<RegionRange>{{0, 0}, {0, 1}}, "groups");
    const std::vector<GroupBlockItem> zero = {{1, 1}, {0, 0}};  // group 0 has no regions
    const std::vector<BlockCopyItem> copies = {{1, 1, 0}};
    const BlockRegion own = region(tensor);
    const std::vector<CopyRegion> copied = {
        {own.base, own.base, own.block_stride, own.block_stride, own.size_bytes, own.unit_bytes}};
    device->launch(device.kernels().copy_blocks,
                   CopyBlocksParams{device.put(copied, "copy regions"), groups,
                                    device.put(copies, "copies"), 1, 1, shape.size});
    device->launch(device.kernels().zero_blocks,
                   ZeroBlocksParams{regions, groups, device.put(zero, "zero"), 2, 1, shape.size});
    for (int i = 0; i < shape.size; ++i) {
      std::uint8_t& source = expected[std::size_t(shape.page_bytes) + shape.offset + i];
      expected[shape.offset + i] = source;
      source = 0;
    }
    EXPECT_EQ(device.get(reinterpret_cast<std::uint8_t*>(tensor), expected.size()), expected);
    device.expect_no_reports();
  });
}

TEST_P(RegionTest, PoisonIsThePatternOfItsPageAndBlock) {
  in_every_mode([&](CheckMode mode, std::uint64_t seed) {
    KernelDevice device(mode, seed);
    oracle::Bytes expected = background(total());
    auto* tensor = reinterpret_cast<std::byte*>(device.put(expected, "tensor"));
    const auto* sizes = device.put(std::vector<std::int64_t>{0, 0, shape.page_bytes}, "page sizes");
    const auto* regions = device.put(std::vector<BlockRegion>{region(tensor)}, "regions");
    const std::vector<PoisonItem> items = {{1, 1}, {0, 2}};
    device->launch(
        device.kernels().poison_blocks,
        PoisonBlocksParams{regions, sizes, device.put(items, "items"), 1, 2, 0, shape.size});
    for (const PoisonItem& item : items)
      for (int i = shape.offset; i < shape.offset + shape.size; ++i)
        expected[std::size_t(shape.page_bytes) * item.block + i] =
            oracle::poison_byte(item.kind, 2, item.block, i);
    EXPECT_EQ(device.get(reinterpret_cast<std::uint8_t*>(tensor), expected.size()), expected);
    device.expect_no_reports();
  });
}

TEST_P(RegionTest, EveryPageOfAFreshPoolIsPoisonedToItsLastByte) {
  KernelDevice device;
  auto* tensor = device.room<std::byte>(total(), "tensor");
  const auto* sizes = device.put(std::vector<std::int64_t>{0, 0, shape.page_bytes}, "page sizes");
  const auto* pages = device.put(std::vector<BlockRegion>{page(tensor)}, "pages");
  device->launch(
      device.kernels().poison_blocks,
      PoisonBlocksParams{pages, sizes, nullptr, 1, shape.num_blocks, 0, shape.page_bytes});
  const auto bytes = device.get(reinterpret_cast<std::uint8_t*>(tensor), total());
  for (std::size_t i = 0; i < bytes.size(); ++i)
    ASSERT_EQ(bytes[i], oracle::poison_byte(0, 2, i / shape.page_bytes, i % shape.page_bytes)) << i;
  device.expect_no_reports();
}

TEST_P(RegionTest, FingerprintsOfPagesAreThoseOfTheirBytesInAnyLaunchShape) {
  in_every_mode([&](CheckMode mode, std::uint64_t seed) {
    KernelDevice device(mode, seed);
    const oracle::Bytes bytes = background(total());
    auto* tensor = reinterpret_cast<std::byte*>(device.put(bytes, "tensor"));
    const auto* pages =
        device.put(std::vector<BlockRegion>{BlockRegion{}, BlockRegion{}, page(tensor)}, "pages");
    const std::vector<FingerprintItem> items = {{2, shape.num_blocks - 1}, {2, 0}};
    const auto* on_device = device.put(items, "items");
    for (const LaunchPlace& place : device.places()) {
      auto* sums = device.put(std::vector<unsigned long long>(4, 0), "sums");
      const FingerprintParams params{pages, on_device, sums, 2, shape.page_bytes};
      ASSERT_EQ(device.kernels().fingerprint_pages(place, params), 0);
      const auto found = device.get(sums, 4);
      for (int i = 0; i < 2; ++i) {
        const auto [a, b] = oracle::fingerprint(
            bytes.data() + std::size_t(items[i].block) * shape.page_bytes, shape.page_bytes);
        EXPECT_EQ(found[2 * i], a);
        EXPECT_EQ(found[2 * i + 1], b);
      }
    }
    device.expect_no_reports();
  });
}

TEST(Fingerprint, EveryFlippedBitAndEverySwapOfWordsChangesIt) {
  oracle::Bytes page = background(256);
  const auto original = oracle::fingerprint(page.data(), page.size());
  for (std::size_t bit = 0; bit < 8 * page.size(); ++bit) {
    page[bit / 8] ^= 1u << bit % 8;
    EXPECT_NE(oracle::fingerprint(page.data(), page.size()), original) << "bit " << bit;
    page[bit / 8] ^= 1u << bit % 8;
  }
  for (std::size_t i = 0; i < 32; ++i)
    for (std::size_t j = 0; j < i; ++j) {
      std::swap_ranges(&page[8 * i], &page[8 * i] + 8, &page[8 * j]);
      EXPECT_NE(oracle::fingerprint(page.data(), page.size()), original) << i << " and " << j;
      std::swap_ranges(&page[8 * i], &page[8 * i] + 8, &page[8 * j]);
    }
}

TEST_P(RegionTest, StatesAdvanceTokenByTokenInPlaceAndFromZero) {
  in_every_mode([&](CheckMode mode, std::uint64_t seed) {
    KernelDevice device(mode, seed);
    oracle::Bytes expected = background(total());
    auto* tensor = reinterpret_cast<std::byte*>(device.put(expected, "tensor"));
    const std::vector<std::uint64_t> contents = {number(1, 1), number(1, 2), number(1, 3)};
    StateCache state{.base = tensor + shape.offset,
                     .page_stride = shape.page_bytes,
                     .size_bytes = shape.size,
                     .unit_bytes = widest(shape.page_bytes, shape.offset, shape.size),
                     .layer = 5,
                     .state = 1};
    const auto* states = device.put(std::vector<StateCache>{state}, "states");
    const auto* groups = device.put(std::vector<RegionRange>{{0, 1}}, "groups");
    const auto* on_device = device.put(contents, "contents");
    const auto update = [&](std::vector<StateUpdateItem> items) {
      const auto count = static_cast<std::int32_t>(items.size());
      device->launch(device.kernels().update_states,
                     StateUpdateParams{states, groups, device.put(items, "items"), on_device, count,
                                       1, shape.size});
    };
    update({{0, 0, 1, 2, 0}});  // from zero into block 1
    update({{0, 1, 1, 1, 2}});  // in place
    const oracle::Bytes after = oracle::state(oracle::Bytes(shape.size, 0), contents, 5, 1);
    std::copy(after.begin(), after.end(), expected.begin() + shape.page_bytes + shape.offset);
    EXPECT_EQ(device.get(reinterpret_cast<std::uint8_t*>(tensor), expected.size()), expected);
    device.expect_no_reports();
  });
}

TEST_P(RegionTest, ACheckpointReceivesTheStateAndTheUpdateContinues) {
  in_every_mode([&](CheckMode mode, std::uint64_t seed) {
    KernelDevice device(mode, seed);
    oracle::Bytes expected = background(total());
    auto* tensor = reinterpret_cast<std::byte*>(device.put(expected, "tensor"));
    const std::vector<std::uint64_t> contents = {number(1, 1), number(1, 2), number(1, 3)};
    const StateCache state{.base = tensor + shape.offset,
                           .page_stride = shape.page_bytes,
                           .size_bytes = shape.size,
                           .unit_bytes = widest(shape.page_bytes, shape.offset, shape.size),
                           .layer = 5,
                           .state = 1};
    device->launch(
        device.kernels().update_states,
        StateUpdateParams{device.put(std::vector<StateCache>{state}, "states"),
                          device.put(std::vector<RegionRange>{{0, 1}}, "groups"),
                          device.put(std::vector<StateUpdateItem>{{0, 0, 1, 3, 0, 2, 2}}, "items"),
                          device.put(contents, "contents"), 1, 1, shape.size});
    for (const auto& [block, count] : {std::pair{1, 3}, std::pair{2, 2}}) {
      const oracle::Bytes after = oracle::state(oracle::Bytes(shape.size, 0),
                                                {contents.begin(), contents.begin() + count}, 5, 1);
      std::copy(after.begin(), after.end(),
                expected.begin() + block * shape.page_bytes + shape.offset);
    }
    EXPECT_EQ(device.get(reinterpret_cast<std::uint8_t*>(tensor), expected.size()), expected);
    device.expect_no_reports();
  });
}

using Waves = std::vector<std::pair<std::size_t, std::size_t>>;

TEST(BlockWaves, MovesThatNeedEachOtherComeInDifferentWaves) {
  BlockWaves blocks(8);
  const auto waves = [&](std::vector<BlockCopyItem> moves) {
    Waves found;
    blocks.for_each_move<BlockCopyItem>(moves, [&](std::size_t first, std::size_t count) {
      found.push_back({first, count});
    });
    return found;
  };
  EXPECT_EQ(waves({}), Waves{});
  EXPECT_EQ(waves({{0, 1, 2}, {0, 1, 3}, {0, 4, 5}}), (Waves{{0, 3}}));
  EXPECT_EQ(waves({{0, 1, 2}, {0, 2, 3}}), (Waves{{0, 1}, {1, 1}}));  // read after write
  EXPECT_EQ(waves({{0, 1, 2}, {0, 3, 2}}), (Waves{{0, 1}, {1, 1}}));  // write after write
  EXPECT_EQ(waves({{0, 1, 2}, {0, 3, 1}, {0, 1, 4}}), (Waves{{0, 1}, {1, 1}, {2, 1}}));
  EXPECT_EQ(waves({{0, 1, 1}, {0, 2, 2}}), (Waves{{0, 2}}));  // in place
}

TEST(BlockWaves, ACheckpointIsWrittenToo) {
  BlockWaves blocks(8);
  const auto waves = [&](std::vector<StateUpdateItem> updates) {
    Waves found;
    blocks.for_each_move<StateUpdateItem>(updates, [&](std::size_t first, std::size_t count) {
      found.push_back({first, count});
    });
    return found;
  };
  const StateUpdateItem chunk{0, 1, 2, 5, 0, 3, 4};
  EXPECT_EQ(waves({chunk, {0, 4, 5, 1, 5}}), (Waves{{0, 2}}));
  EXPECT_EQ(waves({chunk, {0, 3, 5, 1, 5}}), (Waves{{0, 1}, {1, 1}}));    // read after write
  EXPECT_EQ(waves({{0, 3, 5, 1, 5}, chunk}), (Waves{{0, 1}, {1, 1}}));    // write after read
  EXPECT_EQ(waves({{0, 0, 5, 1, 5}, {0, 0, 6, 1, 6}}), (Waves{{0, 2}}));  // none is no block
}

TEST(BlockWaves, ABlockThatIsNamedTwiceIsWrittenInTwoWaves) {
  BlockWaves blocks(8);
  Waves found;
  const std::vector<PoisonItem> items = {{3, 1}, {5, 1}, {3, 0}, {5, 0}, {1, 0}};
  blocks.for_each_write<PoisonItem>(items, [&](std::size_t first, std::size_t count) {
    found.push_back({first, count});
  });
  EXPECT_EQ(found, (Waves{{0, 2}, {2, 3}}));
}

}  // namespace
}  // namespace lockstep::cuda
