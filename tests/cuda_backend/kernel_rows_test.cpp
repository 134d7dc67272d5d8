// Rows into the cache and back: the fill, write and gather kernels against loops over bytes, for
// the shapes that engines use and the ones that break them.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "tests/cuda_backend/kernel_device.h"
#include "tests/cuda_backend/protocol_oracle.h"

namespace lockstep::cuda {
namespace {

// K and V rows, contiguous at `key` and `value`, on their way into the cache.
WritePartsParams write_of(const RowCache& rows, const std::byte* key, const std::byte* value,
                          const Slot* slots, std::int32_t num_tokens) {
  WritePartsParams params{};
  for (std::int32_t i = 0; i < rows.num_parts; ++i)
    params.parts[i] = {.to = part_of(rows, i),
                       .source = i == 0 ? key : value,
                       .source_row_stride = std::int64_t{rows.num_kv_heads} * rows.row_bytes,
                       .source_head_stride = rows.row_bytes,
                       .source_dtype = rows.dtype};
  params.slots = slots;
  params.num_parts = rows.num_parts;
  params.num_rows = num_tokens;
  return params;
}

struct Shape {
  std::string name;
  DType dtype = DType::bf16;
  int num_kv_heads = 1;
  int head_size = 64;
  int block_size = 16;
  int num_blocks = 5;
  int num_parts = 2;
  bool hnd = false;
  int padding_bytes = 0;  // of a page
  int num_tokens = 21;
};

std::vector<Shape> row_shapes() {
  return {
      {.name = "bf16, 8 heads of 128, NHD", .num_kv_heads = 8, .head_size = 128},
      {.name = "bf16, 8 heads of 128, HND", .num_kv_heads = 8, .head_size = 128, .hnd = true},
      {.name = "fp16, heads of 8, block of 1",
       .dtype = DType::fp16,
       .head_size = 8,
       .block_size = 1,
       .num_blocks = 40},
      {.name = "fp32, heads of 80, HND",
       .dtype = DType::fp32,
       .num_kv_heads = 3,
       .head_size = 80,
       .hnd = true},
      {.name = "fp8 e4m3, heads of 64", .dtype = DType::fp8_e4m3, .num_kv_heads = 2},
      {.name = "fp8 e5m2, heads of 64, HND",
       .dtype = DType::fp8_e5m2,
       .num_kv_heads = 2,
       .hnd = true},
      {.name = "int8, heads of 6: rows of 6 bytes",
       .dtype = DType::int8,
       .num_kv_heads = 2,
       .head_size = 6},
      {.name = "bf16, heads of 6: rows of 12 bytes", .num_kv_heads = 2, .head_size = 6},
      {.name = "bf16, heads of 6, HND, padded by 4",
       .num_kv_heads = 2,
       .head_size = 6,
       .hnd = true,
       .padding_bytes = 4},
      {.name = "int8, heads of 5, blocks of 3: rows of 5 bytes",
       .dtype = DType::int8,
       .num_kv_heads = 3,
       .head_size = 5,
       .block_size = 3,
       .num_blocks = 9},
      {.name = "bf16, heads of 12: rows of 24 bytes", .num_kv_heads = 2, .head_size = 12},
      {.name = "MLA: one latent of 576", .head_size = 576, .num_parts = 1},
      {.name = "hidden states: 3 of 128, page padded by 96",
       .num_kv_heads = 3,
       .head_size = 128,
       .block_size = 10,
       .num_parts = 1,
       .padding_bytes = 96},
      {.name = "bf16, heads of 256, block of 2096",
       .num_kv_heads = 1,
       .head_size = 256,
       .block_size = 2096,
       .num_blocks = 2,
       .num_tokens = 40},
      {.name = "two blocks, two heads", .num_kv_heads = 2, .head_size = 16, .num_blocks = 2},
      {.name = "no tokens", .num_tokens = 0},
      {.name = "one token", .num_tokens = 1},
  };
}

// A page of [part][token][head] rows, or [part][head][token], one after the other, then padding.
class RowsTest : public ::testing::TestWithParam<Shape> {
 protected:
  int row_bytes() const { return shape.head_size * oracle::itemsize(shape.dtype); }
  int part_bytes() const { return shape.block_size * shape.num_kv_heads * row_bytes(); }
  int page_bytes() const { return shape.num_parts * part_bytes() + shape.padding_bytes; }
  std::size_t place_of(int block, int part, int offset, int head) const {
    const int row =
        shape.hnd ? head * shape.block_size + offset : offset * shape.num_kv_heads + head;
    return std::size_t(block) * page_bytes() + std::size_t(part) * part_bytes() +
           std::size_t(row) * row_bytes();
  }

  RowCache cache(std::byte* memory) const {
    RowCache rows;
    rows.base = memory;
    rows.block_stride = page_bytes();
    rows.token_stride = shape.hnd ? row_bytes() : shape.num_kv_heads * row_bytes();
    rows.head_stride = shape.hnd ? shape.block_size * row_bytes() : row_bytes();
    rows.part_stride = part_bytes();
    rows.block_size = make_divisor(shape.block_size);
    rows.num_parts = shape.num_parts;
    rows.num_kv_heads = shape.num_kv_heads;
    rows.head_size = shape.head_size;
    rows.row_bytes = row_bytes();
    rows.dtype = shape.dtype;
    for (int unit : {16, 8, 4, 2, 1}) {
      rows.unit_bytes = unit;
      if (page_bytes() % unit == 0 && part_bytes() % unit == 0 && row_bytes() % unit == 0) break;
    }
    return rows;
  }

  // Distinct slots in scattered order, with a padded one in the middle.
  std::vector<Slot> some_slots() const {
    const int count = shape.num_blocks * shape.block_size;
    std::vector<Slot> all;
    for (int i = 0; i < count; ++i) all.push_back(i);
    for (int i = count - 1; i > 0; --i) std::swap(all[i], all[number(7, i) % (i + 1)]);
    all.resize(std::min(count, shape.num_tokens));
    if (all.size() > 2) all[all.size() / 2] = PAD_SLOT_ID;
    return all;
  }

  Shape shape = GetParam();
};

TEST_P(RowsTest, FilledRowsAreWrittenToTheirSlots) {
  in_every_mode([&](CheckMode mode, std::uint64_t seed) {
    KernelDevice device(mode, seed);
    const std::vector<Slot> slots = some_slots();
    const auto num_tokens = static_cast<int>(slots.size());
    std::vector<std::uint64_t> contents;
    for (int t = 0; t < num_tokens; ++t) contents.push_back(number(11, t));

    oracle::Bytes expected(std::size_t(shape.num_blocks) * page_bytes(), 0xA5);
    std::byte* memory = reinterpret_cast<std::byte*>(device.put(expected, "cache"));
    for (int t = 0; t < num_tokens; ++t)
      for (int part = 0; part < shape.num_parts; ++part)
        for (int head = 0; head < shape.num_kv_heads; ++head) {
          if (slots[t] < 0) continue;
          const oracle::Bytes row =
              oracle::row(contents[t], 3, part, head, shape.head_size, shape.dtype);
          std::copy(row.begin(), row.end(),
                    expected.begin() + place_of(int(slots[t]) / shape.block_size, part,
                                                int(slots[t]) % shape.block_size, head));
        }

    const std::int64_t input_bytes = std::int64_t{num_tokens} * shape.num_kv_heads * row_bytes();
    auto* key = device.room<std::byte>(input_bytes, "key");
    auto* value = device.room<std::byte>(input_bytes, "value");
    auto* out_key = device.room<std::byte>(input_bytes, "gathered key");
    auto* out_value = device.room<std::byte>(input_bytes, "gathered value");
    const auto masks =
        [&](int byte) {  // shape() as a word, from what it does to all-ones and zeros
          std::uint8_t e[8];
          std::memset(e, byte, 8);
          for (int i = 0; i < 8; i += oracle::itemsize(shape.dtype))
            oracle::shape_element(e + i, shape.dtype);
          return oracle::word_at(e, 8, 0);
        };
    const std::uint64_t* device_contents = device.put(contents, "contents");
    const Slot* device_slots = device.put(slots, "slots");
    device->launch(device.kernels().fill_rows, FillRowsParams{.contents = device_contents,
                                                              .key = key,
                                                              .value = value,
                                                              .keep_mask = masks(0xFF) ^ masks(0),
                                                              .set_mask = masks(0),
                                                              .num_rows = num_tokens,
                                                              .num_kv_heads = shape.num_kv_heads,
                                                              .num_parts = shape.num_parts,
                                                              .row_bytes = row_bytes(),
                                                              .layer = 3,
                                                              .first_head = 0});
    device->launch(device.engine().write_parts,
                   write_of(cache(memory), key, value, device_slots, num_tokens));
    device->launch(device.kernels().gather_rows,
                   GatherRowsParams{cache(memory), device_slots, out_key, out_value, num_tokens});
    const auto size = static_cast<std::int64_t>(expected.size());
    EXPECT_EQ(device.get(reinterpret_cast<std::uint8_t*>(memory), size), expected);
    if (num_tokens > 0) {
      const auto in = device.get(key, input_bytes), out = device.get(out_key, input_bytes);
      const std::int64_t token_bytes = input_bytes / num_tokens;
      for (int t = 0; t < num_tokens; ++t) {
        if (slots[t] < 0) continue;  // left as it was: undefined
        EXPECT_TRUE(std::equal(in.begin() + t * token_bytes, in.begin() + (t + 1) * token_bytes,
                               out.begin() + t * token_bytes))
            << "token " << t;
      }
    }
    device.expect_no_reports();
  });
}

INSTANTIATE_TEST_SUITE_P(Shapes, RowsTest, ::testing::ValuesIn(row_shapes()),
                         [](const auto& shape) {
                           std::string name = shape.param.name;
                           for (char& c : name)
                             if (!std::isalnum(static_cast<unsigned char>(c))) c = '_';
                           return name;
                         });

// One tensor of 6 GiB whose pages are 1 GiB apart: only what is touched exists.
struct FarPages {
  static constexpr std::int64_t kStride = std::int64_t{1} << 30;

  explicit FarPages(CheckMode mode) : device(mode, 1, 6 * kStride) {
    cache.base = device.room<std::byte>(6 * kStride, "cache");
    cache.block_stride = kStride;
    cache.token_stride = 32;
    cache.head_stride = 32;
    cache.part_stride = 4096;
    cache.block_size = make_divisor(16);
    cache.head_size = 16;
    cache.row_bytes = 32;
    cache.unit_bytes = 16;
  }
  void write(const std::vector<Slot>& slots) {
    const auto count = static_cast<std::int32_t>(slots.size());
    std::vector<std::uint8_t> rows(32 * slots.size(), 0x5A);
    const auto* input = reinterpret_cast<std::byte*>(device.put(rows, "rows"));
    device->launch(device.engine().write_parts,
                   write_of(cache, input, input, device.put(slots, "slots"), count));
  }
  bool row_is_there(Slot slot) {
    const std::int64_t at = slot / 16 * kStride + slot % 16 * 32;
    const auto row = device.get(reinterpret_cast<std::uint8_t*>(cache.base) + at, 32);
    return std::ranges::all_of(row, [](std::uint8_t byte) { return byte == 0x5A; });
  }

  KernelDevice device;
  RowCache cache;
};

TEST(FarRows, RowsBeyondTwoAndFourGibibytesAreWrittenWhereTheyBelong) {
  for (CheckMode mode : {CheckMode::fast, CheckMode::check}) {
    FarPages pages(mode);
    pages.write({0, 2 * 16 + 3, 3 * 16, 4 * 16 + 15, 5 * 16 + 1});
    for (Slot slot : {0, 2 * 16 + 3, 3 * 16, 4 * 16 + 15, 5 * 16 + 1})
      EXPECT_TRUE(pages.row_is_there(slot)) << slot;
    pages.device.expect_no_reports();
  }
}

TEST(FarRows, MutantOffsetInt32IsReportedOutOfBoundsOrLandsElsewhere) {
  FarPages pages(CheckMode::check);
  pages.device.plant(&EngineKernels::write_parts, &DefectKernels::write_in_32_bits);
  pages.write({16 + 3});  // 1 GiB: still right
  EXPECT_TRUE(pages.row_is_there(16 + 3));
  pages.device.expect_no_reports();
  pages.write({2 * 16 + 3});  // 2 GiB: negative
  const auto reports = pages.device.reports();
  ASSERT_FALSE(reports.empty());
  EXPECT_EQ(reports.front().kernel, "write_rows");
  EXPECT_NE(reports.front().kind, "uninitialised read");
}

TEST(Divisor, DividesEveryNumberBelow2To32ByShiftAndMultiply) {
  const auto divide = [](std::uint32_t n, const Divisor& by) {
    return std::uint32_t(((std::uint64_t{n} * by.multiplier >> 32) + n) >> by.shift);
  };
  for (std::uint32_t value :
       {1u, 2u, 3u, 5u, 7u, 16u, 560u, 1056u, 2096u, 65535u, 1u << 31, 4294967295u}) {
    const Divisor by = make_divisor(value);
    for (std::uint32_t i = 0; i < 1000; ++i) {
      const auto n = static_cast<std::uint32_t>(number(value, i));
      for (std::uint32_t near : {n, n - n % value, n - n % value - 1, 0u, 4294967295u})
        ASSERT_EQ(divide(near, by), near / value) << near << " / " << value;
    }
  }
}

}  // namespace
}  // namespace lockstep::cuda
