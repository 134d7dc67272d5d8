// Moves: bytes at any alignment and overlap, pages between caches of different strides, hidden
// states into padded pages and out of them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "tests/cuda_backend/kernel_device.h"
#include "tests/cuda_backend/part_oracle.h"

namespace lockstep::cuda {
namespace {

using oracle::Bytes;

Bytes noise(std::size_t size, std::uint64_t seed = 3) {
  Bytes bytes(size);
  for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::uint8_t>(number(seed, i));
  return bytes;
}

// ---- bytes

struct Span {
  int target, source, size;
};
Bytes moved(KernelDevice& device, const LaunchPlace& place, const Bytes& before,
            const std::vector<Span>& spans) {
  auto* memory = reinterpret_cast<std::byte*>(device.put(before, "states"));
  std::vector<ByteMove> moves;
  std::int64_t longest = 0;
  for (const Span& span : spans) {
    moves.push_back({memory + span.target, memory + span.source, span.size});
    longest = std::max<std::int64_t>(longest, span.size);
  }
  const MoveBytesParams params{device.put(moves, "moves"), static_cast<std::int32_t>(moves.size()),
                               longest};
  EXPECT_EQ(device.engine().move_bytes(place, params), 0);
  return device.get(reinterpret_cast<std::uint8_t*>(memory),
                    static_cast<std::int64_t>(before.size()));
}
Bytes moved_by_memmove(Bytes bytes, const std::vector<Span>& spans) {
  for (const Span& span : spans)
    std::memmove(bytes.data() + span.target, bytes.data() + span.source,
                 static_cast<std::size_t>(span.size));
  return bytes;
}

TEST(MoveBytes, AnyAlignmentOfBothEndsAndAnySizeIsMemcpy) {
  std::vector<Span> spans;
  int at = 0;
  for (int size : {0, 1, 2, 7, 8, 15, 16, 17, 63, 64, 255})
    for (int target : {0, 1, 2, 4, 8, 15})
      for (int source : {0, 1, 3, 8}) {
        spans.push_back({at + target, at + 320 + source, size});
        at += 640;
      }
  const Bytes before = noise(std::size_t(at));
  const Bytes expected = moved_by_memmove(before, spans);
  in_every_mode([&](CheckMode mode, std::uint64_t seed) {
    KernelDevice device(mode, seed);
    for (const LaunchPlace& place : device.places())
      EXPECT_EQ(moved(device, place, before, spans), expected);
    device.expect_no_reports();
  });
}

TEST(MoveBytes, AMoveOfManyCtasIsMemcpy) {
  const Bytes before = noise(400'000);
  const std::vector<Span> spans = {{3, 200'000, 150'001}};
  in_every_mode([&](CheckMode mode, std::uint64_t seed) {
    KernelDevice device(mode, seed);
    EXPECT_EQ(moved(device, device.places()[1], before, spans), moved_by_memmove(before, spans));
    device.expect_no_reports();
  });
}

// The state of a convolution, [state_len, channels] of bf16, moved on by one token or more; and the
// other direction, which no engine needs and memmove has.
std::vector<Span> shifts() {
  std::vector<Span> spans;
  int at = 16;
  for (int size : {6, 48, 100, 1000, 5000})
    for (int by : {1, 2, 6, 16, 48, 512}) {
      spans.push_back({at, at + by, size});
      at += size + 1024;
      spans.push_back({at + by, at, size});
      at += size + 1024;
    }
  return spans;
}
std::size_t room_of(const std::vector<Span>& spans) {
  return static_cast<std::size_t>(spans.back().target + spans.back().size + 2048);
}

TEST(MoveBytes, AnOverlappingShiftIsMemmoveInBothDirections) {
  const std::vector<Span> spans = shifts();
  const Bytes before = noise(room_of(spans));
  const Bytes expected = moved_by_memmove(before, spans);
  in_every_mode([&](CheckMode mode, std::uint64_t seed) {
    KernelDevice device(mode, seed);
    for (const LaunchPlace& place : {device.places()[0], device.places()[1]})
      EXPECT_EQ(moved(device, place, before, spans), expected);
    device.expect_no_reports();
  });
}

TEST(MoveBytesSlow, AnOverlappingShiftIsMemmoveUnderAHundredSeedsOfPreemption) {
  const std::vector<Span> spans = {{16, 22, 100}, {600, 606, 1000}, {2048, 2000, 1000}};
  const Bytes before = noise(4096);
  const Bytes expected = moved_by_memmove(before, spans);
  in_every_mode(
      [&](CheckMode mode, std::uint64_t seed) {
        KernelDevice device(mode, seed);
        EXPECT_EQ(moved(device, device.places()[1], before, spans), expected);
        device.expect_no_reports();
      },
      kHuntsOfSlowTests);
}

// The shift cut into moves of 16 bytes, which a launch does in no order: one's target is another's
// source.
TEST(MoveBytes, MutantStateShiftRaceIsReportedAndMostSeedsShowWrongBytes) {
  const std::vector<Span> spans = {{0, 96, 3008}};
  std::vector<Span> pieces;
  for (int at = 0; at < 3008; at += 16) pieces.push_back({at, at + 96, 16});
  const Bytes before = noise(4096);
  const Bytes expected = moved_by_memmove(before, spans);
  int wrong = 0;
  for (int seed = 1; seed <= 5; ++seed) {
    KernelDevice device(CheckMode::hunt, std::uint64_t(seed));
    wrong += moved(device, device.places()[1], before, pieces) != expected;
    const auto reports = device.reports();
    ASSERT_FALSE(reports.empty()) << "seed " << seed;
    EXPECT_EQ(reports.front().kernel, "move_bytes");
    EXPECT_EQ(reports.front().kind, "race");
  }
  EXPECT_GE(wrong, 3);
}

// ---- pages

struct Cache {
  std::int64_t page_bytes;
  int num_blocks;
  std::vector<std::int64_t> offsets;  // of the regions in a page

  std::size_t size() const { return static_cast<std::size_t>(page_bytes * num_blocks); }
};
struct PageShape {
  std::string name;
  Cache device, host;
  std::int64_t region_bytes;
  int unit_bytes;
};
std::vector<PageShape> page_shapes() {
  return {
      {"a page to a packed host page", {4096, 6, {0}}, {4096, 6, {0}}, 4096, 16},
      {"a padded page to a packed host page", {1024, 6, {0}}, {960, 9, {0}}, 960, 16},
      {"K and V apart to one host page", {2048, 5, {0, 1024}}, {1536, 5, {0, 768}}, 768, 16},
      {"four layers of a packed page",
       {800, 5, {0, 200, 400, 600}},
       {720, 8, {0, 180, 360, 540}},
       180,
       4},
      {"pages of odd size", {77, 9, {5}}, {60, 9, {0}}, 60, 1},
      {"one long region of few blocks", {300'032, 2, {32}}, {300'000, 2, {0}}, 300'000, 16},
  };
}

class CopyBlocks : public ::testing::TestWithParam<PageShape> {
 protected:
  // In one direction; `pairs` name blocks of `from`, then of `to`.
  static CopyBlocksParams params(KernelDevice& device, const PageShape& shape, std::byte* from,
                                 const Cache& from_cache, std::byte* to, const Cache& to_cache,
                                 const std::vector<BlockCopyItem>& pairs) {
    std::vector<CopyRegion> regions;
    for (std::size_t i = 0; i < from_cache.offsets.size(); ++i)
      regions.push_back({to + to_cache.offsets[i], from + from_cache.offsets[i],
                         to_cache.page_bytes, from_cache.page_bytes, shape.region_bytes,
                         shape.unit_bytes});
    const auto count = static_cast<std::int32_t>(regions.size());
    return {device.put(regions, "regions"),
            device.put(std::vector<RegionRange>{{0, 0}, {0, count}}, "groups"),
            device.put(pairs, "pairs"),
            static_cast<std::int32_t>(pairs.size()),
            count,
            shape.region_bytes};
  }
  static void copy_expected(const PageShape& shape, const Bytes& from, const Cache& from_cache,
                            Bytes& to, const Cache& to_cache,
                            const std::vector<BlockCopyItem>& pairs) {
    for (const BlockCopyItem& pair : pairs)
      for (std::size_t i = 0; i < from_cache.offsets.size(); ++i)
        for (std::int64_t b = 0; b < shape.region_bytes; ++b)
          to[pair.target * to_cache.page_bytes + to_cache.offsets[i] + b] =
              from[pair.source * from_cache.page_bytes + from_cache.offsets[i] + b];
  }
  // Out to the host and back to other blocks.
  void expect_payload_alone_moved_in_every_mode(int hunts = 2) const;

  PageShape shape = GetParam();
  std::vector<BlockCopyItem> out = {{1, 1, 0}, {1, 0, 1}};   // device to host
  std::vector<BlockCopyItem> back = {{1, 0, 1}, {1, 1, 0}};  // host to device: to other blocks
};

void CopyBlocks::expect_payload_alone_moved_in_every_mode(int hunts) const {
  const Bytes on_device = noise(shape.device.size(), 5), on_host = noise(shape.host.size(), 6);
  Bytes expected_host = on_host, expected_device = on_device;
  copy_expected(shape, on_device, shape.device, expected_host, shape.host, out);
  copy_expected(shape, expected_host, shape.host, expected_device, shape.device, back);
  const auto body = [&](CheckMode mode, std::uint64_t seed) {
    KernelDevice device(mode, seed);
    for (const LaunchPlace& place : device.places()) {
      auto* pages = reinterpret_cast<std::byte*>(device.put(on_device, "pages"));
      auto* pinned = reinterpret_cast<std::byte*>(device.put(on_host, "pinned"));
      EXPECT_EQ(device.kernels().copy_blocks(
                    place, params(device, shape, pages, shape.device, pinned, shape.host, out)),
                0);
      EXPECT_EQ(device.kernels().copy_blocks(
                    place, params(device, shape, pinned, shape.host, pages, shape.device, back)),
                0);
      EXPECT_EQ(device.get(reinterpret_cast<std::uint8_t*>(pinned), shape.host.size()),
                expected_host);
      EXPECT_EQ(device.get(reinterpret_cast<std::uint8_t*>(pages), shape.device.size()),
                expected_device);
    }
    device.expect_no_reports();
  };
  in_every_mode(body, hunts);
}
TEST_P(CopyBlocks, SwapOutAndInMovesPayloadByBlockAndOffsetAndNoPadding) {
  expect_payload_alone_moved_in_every_mode();
}
INSTANTIATE_TEST_SUITE_P(Shapes, CopyBlocks, ::testing::ValuesIn(page_shapes()),
                         [](const auto& shape) { return test_name(shape.param.name); });

using CopyBlocksSlow = CopyBlocks;
TEST_P(CopyBlocksSlow, MovesPayloadAloneUnderAHundredSeedsOfPreemption) {
  expect_payload_alone_moved_in_every_mode(kHuntsOfSlowTests);
}
INSTANTIATE_TEST_SUITE_P(Shapes, CopyBlocksSlow, ::testing::ValuesIn(page_shapes()),
                         [](const auto& shape) { return test_name(shape.param.name); });

TEST_P(CopyBlocks, MutantPageFlattenedReadsOtherBytesWhereTheSourceIsPadded) {
  const Bytes on_device = noise(shape.device.size(), 5);
  Bytes expected(shape.host.size(), 0);
  copy_expected(shape, on_device, shape.device, expected, shape.host, out);
  for (const bool flattened : {true, false}) {
    KernelDevice device;
    auto* pages = reinterpret_cast<std::byte*>(device.put(on_device, "pages"));
    auto* pinned = reinterpret_cast<std::byte*>(device.put(Bytes(shape.host.size(), 0), "pinned"));
    Cache from = shape.device;
    std::vector<BlockCopyItem> pairs = out;
    if (flattened)
      from.page_bytes = shape.region_bytes;
    else
      std::swap(pairs.front().source, pairs.back().source);
    device->launch(device.kernels().copy_blocks,
                   params(device, shape, pages, from, pinned, shape.host, pairs));
    const bool exposed = !flattened || shape.region_bytes != shape.device.page_bytes;
    EXPECT_EQ(device.get(reinterpret_cast<std::uint8_t*>(pinned), shape.host.size()) != expected,
              exposed);
  }
}

TEST(CopyBlocksFar, PagesBeyondFourGibibytesAreReadAndWrittenAtTheirAddresses) {
  constexpr std::int64_t kPage = std::int64_t{1} << 30;
  in_every_mode([&](CheckMode mode, std::uint64_t seed) {
    KernelDevice device(mode, seed, 6 * kPage);
    auto* pages = device.room<std::byte>(6 * kPage, "pages");
    const Bytes page = noise(4096);
    device->upload(pages + 5 * kPage, page.data(), 4096);
    auto* buffer = device.room<std::byte>(4096, "pinned");
    const auto copy = [&](CopyRegion region, BlockCopyItem item) {
      device->launch(
          device.kernels().copy_blocks,
          CopyBlocksParams{device.put(std::vector<CopyRegion>{region}, "regions"),
                           device.put(std::vector<RegionRange>{{0, 1}}, "groups"),
                           device.put(std::vector<BlockCopyItem>{item}, "items"), 1, 1, 4096});
    };
    copy({buffer, pages, 4096, kPage, 4096, 16}, {0, 5, 0});
    copy({pages, buffer, kPage, 4096, 4096, 16}, {0, 0, 3});
    EXPECT_EQ(device.get(reinterpret_cast<std::uint8_t*>(pages) + 3 * kPage, 4096), page);
    device.expect_no_reports();
  });
}

// ---- hidden states

// Three layers' hidden states of a token are one row of three heads. Their group has blocks of ten
// tokens in pages that are padded to the common page; a prompt comes in two chunks.
TEST(HiddenStates, OfAChunkedPromptAreExtractedFromPaddedPages) {
  constexpr int kTokens = 37, kLayers = 3, kHidden = 40, kBlockSize = 10;
  constexpr int kRow = kLayers * kHidden * 2;
  oracle::Part part{.num_heads = kLayers,
                    .head_size = kHidden,
                    .block_size = kBlockSize,
                    .page_bytes = kRow * kBlockSize + 112};
  const Bytes rows = noise(kTokens * kRow);
  std::vector<Slot> slots;
  const int blocks[] = {4, 1, 6, 2};
  for (int t = 0; t < kTokens; ++t)
    slots.push_back(blocks[t / kBlockSize] * kBlockSize + t % kBlockSize);
  in_every_mode([&](CheckMode mode, std::uint64_t seed) {
    KernelDevice device(mode, seed);
    const Bytes before = noise(8 * part.page_bytes, 9);
    auto* pages = reinterpret_cast<std::byte*>(device.put(before, "hidden states"));
    const auto* source = reinterpret_cast<std::byte*>(device.put(rows, "rows"));
    const Slot* on_device = device.put(slots, "slots");
    for (const auto& [first, last] : {std::pair{0, 16}, std::pair{16, kTokens}}) {
      WritePartsParams params{};
      params.parts[0] = {part.layout(pages, nullptr), source + first * kRow, kRow, 2 * kHidden,
                         DType::bf16};
      params.slots = on_device + first;
      params.num_parts = 1;
      params.num_rows = last - first;
      device->launch(device.engine().write_parts, params);
    }
    RowCache cache;
    cache.base = pages;
    cache.block_stride = part.page_bytes;
    cache.token_stride = kRow;
    cache.head_stride = 2 * kHidden;
    cache.block_size = make_divisor(kBlockSize);
    cache.num_parts = 1;
    cache.num_kv_heads = kLayers;
    cache.row_bytes = 2 * kHidden;
    cache.unit_bytes = 16;
    auto* out = device.room<std::byte>(kTokens * kRow, "extracted");
    device->launch(device.kernels().gather_rows,
                   GatherRowsParams{cache, on_device, out, nullptr, kTokens});
    EXPECT_EQ(device.get(reinterpret_cast<std::uint8_t*>(out), kTokens * kRow), rows);
    Bytes expected = before;
    for (int t = 0; t < kTokens; ++t)
      std::copy_n(rows.begin() + t * kRow, kRow,
                  expected.begin() + part.element_at(slots[t] / kBlockSize, t % kBlockSize, 0, 0));
    EXPECT_EQ(device.get(reinterpret_cast<std::uint8_t*>(pages), expected.size()), expected);
    device.expect_no_reports();
  });
}

}  // namespace
}  // namespace lockstep::cuda
