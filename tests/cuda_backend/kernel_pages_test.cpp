// HiSparse's rows on the device: written rows are copied to the host, read rows to hot regions, by
// the rule of the reference, and readers find each row.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "base/seeded_random.h"
#include "sim/step/page_planner.h"
#include "tests/cuda_backend/kernel_device.h"

namespace lockstep::cuda::kernel_pages_tests {
namespace {

constexpr int kRows = 2;       // of the batch
constexpr int kBlockSize = 4;  // rows
constexpr int kRowBytes = 16;
constexpr int kNumBlocks = 8;   // of the device and of the host
constexpr int kEntries = 4;     // of a row of host blocks
constexpr int kHotEntries = 2;  // of a hot region
constexpr int kSlots = kHotEntries * kBlockSize;
constexpr int kPositions = kEntries * kBlockSize;
// Pages of device blocks are padded.
constexpr int kBlockStride = 2 * kBlockSize * kRowBytes;
constexpr int kHostStride = kBlockSize * kRowBytes;

using Ids = std::vector<std::int32_t>;
using Bytes = std::vector<std::byte>;

// A row of a block, told apart from every other by its first byte.
Bytes pool(int stride, int first_value) {
  Bytes bytes(static_cast<std::size_t>(kNumBlocks * stride));
  for (int block = 0; block < kNumBlocks; ++block)
    for (int row = 0; row < kBlockSize; ++row)
      std::fill_n(bytes.begin() + block * stride + row * kRowBytes, kRowBytes,
                  std::byte(first_value + block * kBlockSize + row));
  return bytes;
}

struct Pages {
  explicit Pages(CheckMode mode = CheckMode::check) : device(mode) {
    rows.host = device.put(pool(kHostStride, 100), "host");
    rows.host_block_stride = kHostStride;
    rows.host_table = device.put(Ids{5, 2, 7, 1, 3, 6, 4, 0}, "host table");
    rows.host_width = kEntries;
    rows.hot = device.put(Bytes(kNumBlocks * kBlockStride), "cache");
    rows.hot_block_stride = kBlockStride;
    rows.hot_table = device.put(Ids{6, 1, 3, 2}, "hot table");
    rows.hot_width = kHotEntries;
    held = device.put(Ids(kRows * kSlots, 99), "held");
    order = device.put(Ids(kRows * kSlots, 0), "order");
    used = device.put(Ids(kRows * kSlots, 0), "used");
    places = device.put(Ids(kRows * kPositions, -1), "places");
    rows.held = held;
    rows.places = places;
    rows.num_slots = kSlots;
    rows.num_positions = kPositions;
    rows.block_size = make_divisor(kBlockSize);
    rows.row_bytes = kRowBytes;
    rows.unit_bytes = 8;
    clear({0, 1});
  }
  void clear(const Ids& cleared) {
    device->launch(device.kernels().clear_regions,
                   ClearRegionsParams{device.put(cleared, "rows"), held, order,
                                      static_cast<std::int32_t>(cleared.size()), kSlots});
  }
  // The slots that rows were brought to, by position.
  std::vector<HotRegions::Swap> read(std::int32_t row, const Ids& positions) {
    const auto count = static_cast<std::int32_t>(positions.size());
    const AwayRows* away = device.put(std::vector<AwayRows>{rows}, "away");
    HotSwap* swaps = device.room<HotSwap>(count, "swaps");
    device->launch(device.kernels().hot_reads,
                   HotReadParams{device.put(std::vector<HotReadItem>{{row, 0, count}}, "reads"),
                                 device.put(positions, "positions"), away, held, places, order,
                                 used, swaps, 1, ++num_reads});
    device->launch(device.kernels().swap_rows, SwapRowsParams{away, swaps, 1, count, kRowBytes});
    std::vector<HotRegions::Swap> brought;
    const std::vector<HotSwap> found = device.get(swaps, count);
    for (std::int32_t i = 0; i < count; ++i)
      if (found[i].host_row >= 0) brought.push_back({positions[i], found[i].slot});
    return brought;
  }
  int hot_value(std::int32_t row, std::int32_t slot) {
    const Ids table = device.get(rows.hot_table, kRows * kHotEntries);
    const std::int32_t block = table[row * kHotEntries + slot / kBlockSize];
    const std::byte* at = rows.hot + block * kBlockStride + slot % kBlockSize * kRowBytes;
    const Bytes bytes = device.get(at, kRowBytes);
    EXPECT_EQ(std::ranges::count(bytes, bytes.front()), kRowBytes);
    return static_cast<int>(bytes.front());
  }

  KernelDevice device;
  AwayRows rows;
  std::int32_t *held = nullptr, *order = nullptr, *used = nullptr, *places = nullptr;
  std::int32_t num_reads = 0;
};

TEST(KernelPages, ReadsUseTheSlotsOfTheReference) {
  for (CheckMode mode : {CheckMode::fast, CheckMode::check}) {
    Pages pages(mode);
    HotRegions reference;
    SeededRandom random(7);
    std::int64_t hits = 0, swaps = 0;
    for (int step = 0; step < 60; ++step) {
      const auto row = static_cast<std::int32_t>(random.below(kRows));
      if (random.below(12) == 0) {
        pages.clear({row});
        reference.clear(row);
      }
      std::set<std::int32_t> chosen;
      while (std::ssize(chosen) < 1 + static_cast<std::ptrdiff_t>(random.below(kSlots)))
        chosen.insert(static_cast<std::int32_t>(random.below(kPositions)));
      Ids positions(chosen.begin(), chosen.end());
      if (random.below(2) == 0) std::ranges::reverse(positions);
      const auto expected = reference.read(row, kSlots, positions);
      EXPECT_EQ(pages.read(row, positions), expected) << "step " << step;
      hits += std::ssize(positions) - std::ssize(expected);
      swaps += std::ssize(expected);
      const Ids table = pages.device.get(pages.rows.host_table, kRows * kEntries);
      for (const HotRegions::Swap& swap : expected)
        EXPECT_EQ(pages.hot_value(row, swap.slot),
                  100 + table[row * kEntries + swap.position / kBlockSize] * kBlockSize +
                      swap.position % kBlockSize);
    }
    EXPECT_GT(hits, 40);
    EXPECT_GT(swaps, 80);
    pages.device.expect_no_reports();
  }
}

// More rows and slots than a warp looks at at once.
TEST(KernelPages, ReadsOfManyRowsUseTheSlotsOfTheReference) {
  constexpr int kManySlots = 700, kManyPositions = 2000;
  KernelDevice device;
  Ids numbers(kManyPositions);
  std::iota(numbers.begin(), numbers.end(), 0);
  AwayRows rows;
  rows.host_table = device.put(numbers, "host table");
  rows.host_width = kManyPositions / kBlockSize;
  rows.num_slots = kManySlots;
  rows.num_positions = kManyPositions;
  rows.block_size = make_divisor(kBlockSize);
  std::int32_t* held = device.put(Ids(kManySlots, -1), "held");
  std::int32_t* places = device.put(Ids(kManyPositions, -1), "places");
  std::int32_t* order = device.put(Ids(numbers.begin(), numbers.begin() + kManySlots), "order");
  std::int32_t* used = device.put(Ids(kManySlots, 0), "used");
  rows.held = held;
  rows.places = places;
  const AwayRows* away = device.put(std::vector<AwayRows>{rows}, "away");
  HotRegions reference;
  SeededRandom random(11);
  std::int64_t hits = 0, brought = 0;
  for (int read = 1; read <= 12; ++read) {
    const auto count = static_cast<std::int32_t>(1 + random.below(kManySlots));
    Ids positions = numbers;
    for (std::int32_t i = 0; i < count; ++i)
      std::swap(positions[i], positions[i + random.below(kManyPositions - i)]);
    positions.resize(count);
    HotSwap* swaps = device.room<HotSwap>(count, "swaps");
    device->launch(device.kernels().hot_reads,
                   HotReadParams{device.put(std::vector<HotReadItem>{{0, 0, count}}, "reads"),
                                 device.put(positions, "positions"), away, held, places, order,
                                 used, swaps, 1, read});
    std::vector<HotRegions::Swap> found;
    const std::vector<HotSwap> all = device.get(swaps, count);
    for (std::int32_t i = 0; i < count; ++i)
      if (all[i].host_row >= 0) found.push_back({positions[i], all[i].slot});
    EXPECT_EQ(found, reference.read(0, kManySlots, positions)) << "read " << read;
    brought += std::ssize(found);
    hits += count - std::ssize(found);
  }
  EXPECT_GT(hits, 200);
  EXPECT_GT(brought, 1000);
  device.expect_no_reports();
}

TEST(KernelPages, OnlyRowsThatAStepWritesAreCopiedToTheHost) {
  for (CheckMode mode : {CheckMode::fast, CheckMode::check}) {
    Pages pages(mode);
    const std::byte* cache = pages.device.put(pool(kBlockStride, 0), "resident");
    // Rows 2 and 3 of block 3 go to host block 1, row 0 of block 4 to host block 6. Row 1 of block
    // 4 is not written, and row 2 of block 7 has no page on the host.
    const auto items = std::vector<RowMirrorItem>{{3 * kBlockSize + 2, 1 * kBlockSize + 2, 2},
                                                  {4 * kBlockSize, 6 * kBlockSize, 2}};
    const auto slots = std::vector<Slot>{16, 15, PAD_SLOT_ID, 14, 30};
    const auto layers =
        std::vector<MirrorLayer>{{cache, kBlockStride, pages.device.put(slots, "slots"), 0, 2, 0}};
    pages.device->launch(
        pages.device.kernels().mirror_rows,
        MirrorRowsParams{pages.device.put(layers, "layers"),
                         pages.device.put(std::vector<AwayRows>{pages.rows}, "away"),
                         pages.device.put(items, "items"), 1, 5, kRowBytes});
    Bytes expected = pool(kHostStride, 100);
    const auto put = [&](int host_row, int value) {
      std::fill_n(expected.begin() + host_row * kRowBytes, kRowBytes, std::byte(value));
    };
    put(1 * kBlockSize + 2, 14);
    put(1 * kBlockSize + 3, 15);
    put(6 * kBlockSize, 16);
    EXPECT_EQ(pages.device.get(pages.rows.host, kNumBlocks * kHostStride), expected);
    pages.device.expect_no_reports();
  }
}

// A resident page, a row that is held, one that is not, and one whose slot another has taken.
TEST(KernelPages, ReadersFindRowsOnTheirPageInTheRegionOrOnTheHost) {
  Pages pages;
  RowCache cache;
  cache.base = const_cast<std::byte*>(pages.rows.hot);
  cache.block_stride = kBlockStride;
  cache.token_stride = cache.row_bytes = kRowBytes;
  cache.block_size = make_divisor(kBlockSize);
  cache.num_parts = 1;
  cache.head_size = kRowBytes;
  cache.unit_bytes = 16;
  cache.table = pages.device.put(Ids{0, 5, 0, 0, 0, 0, 0, 0}, "residency");
  cache.table_width = kEntries;
  const Bytes resident(kBlockSize * kRowBytes, std::byte{77});
  pages.device->upload(cache.base + 5 * kBlockStride, resident.data(), kBlockSize * kRowBytes);
  pages.read(0, {9, 2});
  // Held rows alone are changed in the region, so that what is read there shows it.
  const Bytes in_region(kRowBytes, std::byte{55});
  pages.device->upload(cache.base + 6 * kBlockStride, in_region.data(), kRowBytes);
  cache.away = pages.device.put(std::vector<AwayRows>{pages.rows}, "away");
  const RowCache* layers = pages.device.put(std::vector<RowCache>{cache}, "layers");
  const auto digest_of = [&](std::int32_t position) {
    auto* digest = pages.device.put(std::vector<unsigned long long>{0}, "digest");
    pages.device->launch(
        pages.device.kernels().attention_digest,
        DigestParams{
            layers,
            pages.device.put(std::vector<DigestPiece>{{0, 0, 0, position, position + 1}}, "pieces"),
            digest, 1, 1});
    return pages.device.get(digest, 1).front();
  };
  // The same digest of a plain cache whose row holds the value.
  const auto digest_of_value = [&](int value, std::int32_t position) {
    RowCache plain = cache;
    plain.away = nullptr;
    Bytes bytes(kNumBlocks * kBlockStride, std::byte(value));
    plain.base = pages.device.put(bytes, "plain");
    plain.table = pages.device.put(Ids(kRows * kEntries, 1), "plain table");
    auto* digest = pages.device.put(std::vector<unsigned long long>{0}, "digest");
    pages.device->launch(
        pages.device.kernels().attention_digest,
        DigestParams{
            pages.device.put(std::vector<RowCache>{plain}, "layers"),
            pages.device.put(std::vector<DigestPiece>{{0, 0, 0, position, position + 1}}, "pieces"),
            digest, 1, 1});
    return pages.device.get(digest, 1).front();
  };
  EXPECT_EQ(digest_of(6), digest_of_value(77, 6));                          // on its page
  EXPECT_EQ(digest_of(9), digest_of_value(55, 9));                          // slot 0 of the region
  EXPECT_EQ(digest_of(10), digest_of_value(100 + 7 * kBlockSize + 2, 10));  // host block 7
  pages.clear({0});
  EXPECT_EQ(digest_of(9), digest_of_value(100 + 7 * kBlockSize + 1, 9));
  pages.device.expect_no_reports();
}

}  // namespace
}  // namespace lockstep::cuda::kernel_pages_tests
