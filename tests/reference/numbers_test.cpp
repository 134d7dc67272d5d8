// What an 8-bit cache holds of a number: values known by hand, order, symmetry, and how far a
// stored number may be from the one that it stands for.
#include "reference/memory/numbers.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "reference/memory/attention_oracle.h"
#include "reference/memory/content.h"

namespace lockstep {
namespace {

constexpr DType kStored[] = {DType::fp8_e4m3, DType::fp8_e5m2, DType::int8};

// source_index() of 0.5 and 0.75. The next lower exponents are those of 2^-5, 2^-17 and 2^-21.
constexpr std::size_t kHalf = 384, kThreeQuarters = kHalf + 64;

float source_of(std::size_t index) { return std::bit_cast<float>(source_bits(index) << 16); }
std::size_t index_of(std::uint64_t key, std::uint64_t i) {
  return source_index(row_word(key, i / 4, {}) >> 16 * (i % 4));
}

// Between the format's numbers next to x.
double step_at(DType dtype, double x) {
  if (dtype == DType::int8) return 1;
  const bool e4m3 = dtype == DType::fp8_e4m3;
  return std::exp2(std::max(std::floor(std::log2(x)), e4m3 ? -6.0 : -14.0) - (e4m3 ? 3 : 2));
}

TEST(Numbers, OfOneHalfAreKnownByHand) {
  // 0.5 * 448 / 0.81 = 276.5: 288 in e4m3 (0x79: 1.125 * 2^8); 0.5 * 57344 / 0.81 = 35398: 2^15 in
  // e5m2 (0x78); 0.5 * 127 / 0.81 = 78.4.
  const StoredNumbers& e4m3 = *stored_numbers(Numbers::real, DType::fp8_e4m3, 0);
  const StoredNumbers& e5m2 = *stored_numbers(Numbers::real, DType::fp8_e5m2, 0);
  const StoredNumbers& int8 = *stored_numbers(Numbers::real, DType::int8, 0);
  EXPECT_EQ(e4m3.bytes[kHalf], 0x79);
  EXPECT_EQ(e5m2.bytes[kHalf], 0x78);
  EXPECT_EQ(int8.bytes[kHalf], 78);
  EXPECT_EQ(int8.bytes[kHalf + kMagnitudes], 0x100 - 78);
  EXPECT_NEAR(int8.worth(kHalf), 78 * 0.81 / 127, 1e-7);
  // 255/256 is above 0.93: every format saturates. 2^-17 is 2.2 of e4m3's smallest numbers, 2^-21
  // is 0 and keeps its sign.
  EXPECT_EQ(e4m3.bytes[kMagnitudes - 1], 0x7E);
  EXPECT_EQ(e5m2.bytes[kMagnitudes - 1], 0x7B);
  EXPECT_EQ(int8.bytes[kMagnitudes - 1], 127);
  EXPECT_EQ(int8.bytes[2 * kMagnitudes - 1], 0x80);
  EXPECT_EQ(e4m3.bytes[128], 2);
  EXPECT_EQ(e4m3.bytes[0], 0);
  EXPECT_EQ(e4m3.bytes[kMagnitudes], 0x80);
  EXPECT_EQ(int8.bytes[kMagnitudes], 0);
}

TEST(Numbers, AreWithinHalfAStepOfTheFormatAndInOrder) {
  for (const DType dtype : kStored)
    for (std::int64_t layer = 0; layer < 8; ++layer) {
      const StoredNumbers& stored = *stored_numbers(Numbers::real, dtype, layer);
      const double largest = stored.worth(kMagnitudes - 1);
      for (std::size_t i = 0; i < kMagnitudes; ++i) {
        const double x = std::min<double>(source_of(i), largest);
        const double step = step_at(dtype, x / stored.scale);
        EXPECT_LE(std::abs(stored.worth(i) - x), step / 2 * stored.scale * 1.000001);
        EXPECT_NEAR(stored.worth(i + kMagnitudes), -stored.worth(i),
                    dtype == DType::int8 && x == largest ? stored.scale * 1.01 : 0);
        EXPECT_LE(stored.worth(i), kStoredMax);
        if (i > 0) {
          EXPECT_GE(stored.worth(i), stored.worth(i - 1));
        }
      }
    }
}

TEST(Numbers, HaveAScaleThatNeighbouringLayersDoNotShare) {
  for (const DType dtype : kStored)
    for (std::int64_t layer = 0; layer < 6; ++layer)
      EXPECT_NE(stored_numbers(Numbers::real, dtype, layer)->bytes,
                stored_numbers(Numbers::real, dtype, layer + 1)->bytes);
}

TEST(Numbers, AreMadeForQuantisedCachesAlone) {
  for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32, DType::uint8})
    EXPECT_EQ(stored_numbers(Numbers::real, dtype, 0), nullptr);
  for (const DType dtype : kStored) EXPECT_EQ(stored_numbers(Numbers::words, dtype, 0), nullptr);
}

// Byte e of word i is the stored byte of element 8 i + e of the row in bf16.
TEST(Numbers, FillAWordWithEightElementsInOrder) {
  const StoredNumbers& stored = *stored_numbers(Numbers::real, DType::int8, 3);
  const WordShape shape{.stored = &stored};
  for (std::uint64_t i = 0; i < 4; ++i)
    for (std::uint64_t e = 0; e < 8; ++e) {
      const std::uint64_t element = 8 * i + e;
      const float x = source_number(77, element);
      EXPECT_EQ(std::signbit(x),
                (row_word(77, element / 4, {}) >> 16 * (element % 4) & 0x8000) != 0);
      const auto byte = static_cast<std::uint8_t>(row_word(77, i, shape) >> 8 * e);
      EXPECT_EQ(static_cast<std::int8_t>(byte),
                std::clamp(std::round(x / stored.scale), -128.0f, 127.0f));
    }
}

// 0.75 is the largest element: 0.75 / 127 is the scale, 0.5 / scale = 84.7 and 0.75 is 127 itself.
TEST(Numbers, OfARowWithAScaleOfItsOwnAreKnownByHand) {
  const StoredNumbers& int8 =
      numbers_by_largest(Numbers::real, KVQuantMode::int8_per_token_head)[kThreeQuarters];
  EXPECT_EQ(int8.scale, 0.75f / 127);
  EXPECT_EQ(int8.bytes[kHalf], 85);
  EXPECT_EQ(int8.bytes[kThreeQuarters], 127);
  EXPECT_EQ(int8.bytes[kThreeQuarters + kMagnitudes], 0x100 - 127);
  // 0.75 * 448 / 0.75 = 448 (0x7E), 0.5 * 448 / 0.75 = 298.7: 288 in e4m3 (0x79: 1.125 * 2^8).
  const StoredNumbers& e4m3 =
      numbers_by_largest(Numbers::real, KVQuantMode::fp8_per_token_head)[kThreeQuarters];
  EXPECT_EQ(e4m3.scale, 0.75f / 448);
  EXPECT_EQ(e4m3.bytes[kThreeQuarters], 0x7E);
  EXPECT_EQ(e4m3.bytes[kHalf], 0x79);
  EXPECT_NEAR(e4m3.worth(kHalf), 288 * 0.75 / 448, 1e-7);
}

TEST(Numbers, OfARowWithAScaleOfItsOwnReachTheEndOfTheFormatAndNoFarther) {
  for (const KVQuantMode mode :
       {KVQuantMode::int8_per_token_head, KVQuantMode::fp8_per_token_head}) {
    const StoredNumbers* rows = numbers_by_largest(Numbers::real, mode);
    const bool int8 = mode == KVQuantMode::int8_per_token_head;
    EXPECT_EQ(rows[255].scale, 1e-6f) << "below it no scale is smaller";
    for (std::size_t largest = 256; largest < kMagnitudes; ++largest) {
      const double top = source_of(largest);
      EXPECT_EQ(rows[largest].bytes[largest], int8 ? 127 : 0x7E);
      EXPECT_NEAR(rows[largest].worth(largest), top, top * 1e-6);
      EXPECT_LE(rows[largest].worth(largest), kStoredMax);
      const DType dtype = int8 ? DType::int8 : DType::fp8_e4m3;
      for (std::size_t i = 0; i <= largest; ++i)
        EXPECT_LE(std::abs(rows[largest].worth(i) - source_of(i)),
                  step_at(dtype, source_of(i) / rows[largest].scale) / 2 * rows[largest].scale *
                      1.000001);
    }
    EXPECT_EQ(numbers_by_largest(Numbers::words, mode), nullptr);
  }
  for (const KVQuantMode mode :
       {KVQuantMode::none, KVQuantMode::fp8_per_tensor, KVQuantMode::nvfp4})
    EXPECT_EQ(numbers_by_largest(Numbers::real, mode), nullptr);
}

// The scale is that of the largest element, and follows the last one, in either half of a word.
TEST(Numbers, OfARowWithAScaleOfItsOwnHaveItBehindThem) {
  for (const std::uint64_t elements : {4, 8, 20, 64})
    for (std::uint64_t key = 1; key <= 20; ++key) {
      const WordShape layer{
          .by_largest = numbers_by_largest(Numbers::real, KVQuantMode::int8_per_token_head),
          .scale_at = elements};
      const WordShape shape = shape_of_row(key, layer);
      float largest = 0;
      std::vector<std::uint8_t> row(elements + 4);
      for (std::uint64_t i = 0; i < row.size(); ++i)
        row[i] = static_cast<std::uint8_t>(row_word(key, i / 8, shape) >> 8 * (i % 8));
      for (std::uint64_t i = 0; i < elements; ++i)
        largest = std::max(largest, std::abs(source_number(key, i)));
      float scale = 0;
      std::memcpy(&scale, row.data() + elements, sizeof scale);
      EXPECT_EQ(scale, std::max(largest / 127, 1e-6f));
      for (std::uint64_t i = 0; i < elements; ++i) {
        const double x = source_number(key, i);
        EXPECT_NEAR(static_cast<std::int8_t>(row[i]) * scale, x, scale * 0.5001);
      }
    }
}

// 0.75 / 6 = 0.125, in units of 0.81 / 2688 414.8: 416 in e4m3 (0x7D: 1.625 * 2^8). An element of
// 0.75 is 5.98 units, stored as 6 (7), one of 0.5 is 3.99: 4 (6). A group of 2^-21 has the scale 0.
TEST(Numbers, OfAGroupAreKnownByHand) {
  const StoredNumbers& group =
      numbers_by_group(Numbers::real, KVQuantMode::nvfp4, 0)[kThreeQuarters];
  EXPECT_EQ(group.scale_bits, 0x7D);
  EXPECT_EQ(group.bytes[kThreeQuarters], 7);
  EXPECT_EQ(group.bytes[kHalf], 6);
  EXPECT_EQ(group.bytes[kThreeQuarters + kMagnitudes], 15);
  EXPECT_NEAR(group.worth(kHalf), 4 * 416 * 0.81 / 2688, 1e-7);
  const StoredNumbers& zeros = numbers_by_group(Numbers::real, KVQuantMode::nvfp4, 0)[0];
  EXPECT_EQ(zeros.scale_bits, 0);
  EXPECT_EQ(zeros.bytes[0], 0);
}

TEST(Numbers, OfAGroupAreWithinAStepAndTheLargestOfThemIsWithinASixteenth) {
  for (std::int64_t layer = 0; layer < 4; ++layer) {
    const StoredNumbers* groups = numbers_by_group(Numbers::real, KVQuantMode::nvfp4, layer);
    for (std::size_t largest = 128; largest < kMagnitudes; ++largest)
      for (std::size_t i = 0; i <= largest; ++i) {
        const StoredNumbers& group = groups[largest];
        EXPECT_LE(std::abs(group.worth(i)), kStoredMax);
        EXPECT_EQ(group.worth(i + kMagnitudes), -group.worth(i));
        EXPECT_LE(std::abs(group.worth(i) - std::min(source_of(i), 6 * group.scale)),
                  group.scale * 1.01);
      }
  }
  EXPECT_EQ(numbers_by_group(Numbers::words, KVQuantMode::nvfp4, 0), nullptr);
  EXPECT_EQ(numbers_by_group(Numbers::real, KVQuantMode::fp8_per_tensor, 0), nullptr);
}

// A row of 32 elements: 16 bytes of them, the even one of two in the low half, and two scales.
TEST(Numbers, OfGroupsLieTwoAByteWithTheirScalesBehindThem) {
  for (std::uint64_t key = 1; key <= 20; ++key) {
    const StoredNumbers* groups = numbers_by_group(Numbers::real, KVQuantMode::nvfp4, 1);
    const WordShape shape{.by_group = groups, .scale_at = 16};
    for (std::uint64_t i = 0; i < 32; ++i) {
      std::size_t largest = 0;
      for (std::uint64_t e = i / 16 * 16; e < i / 16 * 16 + 16; ++e)
        largest = std::max(largest, index_of(key, e) % kMagnitudes);
      const auto byte = static_cast<int>(row_word(key, i / 16, shape) >> (8 * (i % 16 / 2)) & 0xFF);
      const int bits = i % 2 == 0 ? byte & 15 : byte >> 4;
      EXPECT_EQ(bits, groups[largest].bytes[index_of(key, i)]);
      EXPECT_EQ(row_word(key, 2, shape) >> (8 * (i / 16)) & 0xFF, groups[largest].scale_bits);
    }
  }
}

// From -0.75 to 0.75 there are 15 steps of 0.1, whose zero is the eighth of 0 to 15 (7.5 away from
// zero): -0.75 is stored as 1 (0.5 away from zero), 0.5 as 13, 0.75 as 15 (15.5 is beyond the end).
TEST(Numbers, OfARowOfInt4AreKnownByHand) {
  const Int4Row row = int4_row(-0.75f, 0.75f);
  EXPECT_EQ(row.scale, 1.5f / 15);
  EXPECT_EQ(row.zero, 8);
  EXPECT_EQ(row.bits() & 15, 8u);
  EXPECT_EQ(row.nearest(-0.75f), 1);
  EXPECT_EQ(row.nearest(0.5f), 13);
  EXPECT_EQ(row.nearest(0.75f), 15);
  EXPECT_NEAR(row.worth(13), 0.5, 1e-6);
  EXPECT_EQ(int4_row(0.5f, 0.625f).zero, 0);
  EXPECT_EQ(int4_row(-0.625f, -0.5f).zero, 15);
}

TEST(Numbers, OfARowOfInt4AreWithinAStepAndHaveTheirScaleBehindThem) {
  for (const std::uint64_t elements : {8, 24, 64})
    for (std::uint64_t key = 1; key <= 20; ++key) {
      const WordShape shape = shape_of_row(key, {.is_int4 = true, .scale_at = elements / 2});
      std::vector<std::uint8_t> bytes(elements / 2 + 4);
      for (std::uint64_t i = 0; i < bytes.size(); ++i)
        bytes[i] = static_cast<std::uint8_t>(row_word(key, i / 8, shape) >> 8 * (i % 8));
      std::uint32_t bits = 0;
      std::memcpy(&bits, bytes.data() + elements / 2, 4);
      float scale = 0;
      const std::uint32_t pattern = bits & ~15u;
      std::memcpy(&scale, &pattern, 4);
      for (std::uint64_t i = 0; i < elements; ++i) {
        const double x = source_number(key, i);
        const int stored = i % 2 == 0 ? bytes[i / 2] & 15 : bytes[i / 2] >> 4;
        const double worth = (stored - static_cast<int>(bits & 15)) * double{scale};
        EXPECT_EQ(worth, shape.int4.worth(stored));
        EXPECT_LE(std::abs(worth), kStoredMax);
        if (bits % 16 > 0 && bits % 16 < 15) {
          EXPECT_NEAR(worth, x, scale * 1.01);
        }
      }
    }
}

}  // namespace
}  // namespace lockstep
