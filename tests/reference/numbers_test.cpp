// What an 8-bit cache holds of a number: values known by hand, order, symmetry, and how far a
// stored number may be from the one that it stands for.
#include "reference/memory/numbers.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "reference/memory/attention_oracle.h"
#include "reference/memory/content.h"

namespace lockstep {
namespace {

constexpr DType kStored[] = {DType::fp8_e4m3, DType::fp8_e5m2, DType::int8};

TEST(Numbers, OfOneHalfAreKnownByHand) {
  // 0.5 / 0.0081 = 61.7: 60 in e4m3 (0x67: 1.875 * 2^5), 64 in e5m2 (0x54), 62 in int8.
  EXPECT_EQ(stored_numbers(Numbers::real, DType::fp8_e4m3, 0)->bytes[0], 0x67);
  EXPECT_EQ(stored_numbers(Numbers::real, DType::fp8_e5m2, 0)->bytes[0], 0x54);
  EXPECT_EQ(stored_numbers(Numbers::real, DType::int8, 0)->bytes[0], 62);
  EXPECT_EQ(stored_numbers(Numbers::real, DType::int8, 0)->bytes[128], 0x100 - 62);
  EXPECT_NEAR(stored_numbers(Numbers::real, DType::int8, 0)->worth[0], 62 * 0.0081, 1e-7);
}

TEST(Numbers, AreWithinHalfAStepOfTheFormatAndInOrder) {
  for (const DType dtype : kStored)
    for (std::int64_t layer = 0; layer < 8; ++layer) {
      const StoredNumbers& stored = *stored_numbers(Numbers::real, dtype, layer);
      const double step = dtype == DType::int8       ? 1.0
                          : dtype == DType::fp8_e4m3 ? 8.0
                                                     : 16.0;  // between numbers from 64 on
      for (std::size_t i = 0; i < 128; ++i) {
        const double x = 0.5 + static_cast<double>(i) / 256;
        EXPECT_LE(std::abs(stored.worth[i] - x), step / 2 * stored.scale * 1.000001);
        EXPECT_EQ(stored.worth[i + 128], -stored.worth[i]);
        EXPECT_LE(stored.worth[i], kStoredMax);
        if (i > 0) {
          EXPECT_GE(stored.worth[i], stored.worth[i - 1]);
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
  const WordShape bf16 = word_shape(DType::bf16);
  for (std::uint64_t i = 0; i < 4; ++i)
    for (std::uint64_t e = 0; e < 8; ++e) {
      const std::uint64_t element = 8 * i + e;
      const double x = row_element(77, static_cast<std::int64_t>(element), DType::bf16);
      const std::uint64_t bits = row_word(77, element / 4, bf16) >> 16 * (element % 4);
      EXPECT_EQ(std::signbit(x), (bits & 0x8000) != 0);
      const auto byte = static_cast<std::uint8_t>(row_word(77, i, shape) >> 8 * e);
      EXPECT_EQ(static_cast<std::int8_t>(byte), std::round(static_cast<float>(x) / stored.scale));
    }
}

// 0.75 is the largest element: 0.75 / 127 is the scale, 0.5 / scale = 84.7 and 0.75 is 127 itself.
TEST(Numbers, OfARowWithAScaleOfItsOwnAreKnownByHand) {
  const StoredNumbers& int8 =
      numbers_by_largest(Numbers::real, KVQuantMode::int8_per_token_head)[64];
  EXPECT_EQ(int8.scale, 0.75f / 127);
  EXPECT_EQ(int8.bytes[0], 85);
  EXPECT_EQ(int8.bytes[64], 127);
  EXPECT_EQ(int8.bytes[64 + 128], 0x100 - 127);
  // 0.75 * 448 / 0.75 = 448 (0x7E), 0.5 * 448 / 0.75 = 298.7: 288 in e4m3 (0x79: 1.125 * 2^8).
  const StoredNumbers& e4m3 =
      numbers_by_largest(Numbers::real, KVQuantMode::fp8_per_token_head)[64];
  EXPECT_EQ(e4m3.scale, 0.75f / 448);
  EXPECT_EQ(e4m3.bytes[64], 0x7E);
  EXPECT_EQ(e4m3.bytes[0], 0x79);
  EXPECT_NEAR(e4m3.worth[0], 288 * 0.75 / 448, 1e-7);
}

TEST(Numbers, OfARowWithAScaleOfItsOwnReachTheEndOfTheFormatAndNoFarther) {
  for (const KVQuantMode mode :
       {KVQuantMode::int8_per_token_head, KVQuantMode::fp8_per_token_head}) {
    const StoredNumbers* rows = numbers_by_largest(Numbers::real, mode);
    const bool int8 = mode == KVQuantMode::int8_per_token_head;
    for (std::size_t largest = 0; largest < kMantissas; ++largest) {
      const double top = 0.5 + static_cast<double>(largest) / 256;
      EXPECT_EQ(rows[largest].bytes[largest], int8 ? 127 : 0x7E);
      EXPECT_NEAR(rows[largest].worth[largest], top, top * 1e-6);
      EXPECT_LE(rows[largest].worth[largest], kStoredMax);
      const double step = int8 ? 1 : 32;  // between the format's largest numbers
      for (std::size_t i = 0; i <= largest; ++i)
        EXPECT_LE(std::abs(rows[largest].worth[i] - (0.5 + static_cast<double>(i) / 256)),
                  step / 2 * rows[largest].scale * 1.000001);
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
      for (std::uint64_t i = 0; i < elements; ++i) {
        const double x = row_element(key, static_cast<std::int64_t>(i), DType::bf16);
        largest = std::max(largest, static_cast<float>(std::abs(x)));
      }
      float scale = 0;
      std::memcpy(&scale, row.data() + elements, sizeof scale);
      EXPECT_EQ(scale, largest / 127);
      for (std::uint64_t i = 0; i < elements; ++i) {
        const double x = row_element(key, static_cast<std::int64_t>(i), DType::bf16);
        EXPECT_NEAR(static_cast<std::int8_t>(row[i]) * scale, x, scale * 0.5001);
      }
    }
}

// 0.75 / 6 = 0.125, in units of 0.0081 15.4: 15 in e4m3 (0x57: 1.875 * 2^3). An element of 0.75 is
// 6.17 units, stored as 6 (7), one of 0.5 is 4.1: 4 (6).
TEST(Numbers, OfAGroupAreKnownByHand) {
  const StoredNumbers& group = numbers_by_group(Numbers::real, KVQuantMode::nvfp4, 0)[64];
  EXPECT_EQ(group.scale_bits, 0x57);
  EXPECT_EQ(group.bytes[64], 7);
  EXPECT_EQ(group.bytes[0], 6);
  EXPECT_EQ(group.bytes[64 + 128], 15);
  EXPECT_NEAR(group.worth[0], 4 * 15 * 0.0081, 1e-7);
}

TEST(Numbers, OfAGroupAreWithinAStepAndTheLargestOfThemIsWithinASixteenth) {
  for (std::int64_t layer = 0; layer < 4; ++layer) {
    const StoredNumbers* groups = numbers_by_group(Numbers::real, KVQuantMode::nvfp4, layer);
    for (std::size_t largest = 0; largest < kMantissas; ++largest)
      for (std::size_t i = 0; i <= largest; ++i) {
        const double x = 0.5 + static_cast<double>(i) / 256;
        EXPECT_LE(std::abs(groups[largest].worth[i]), kStoredMax);
        EXPECT_EQ(groups[largest].worth[i + 128], -groups[largest].worth[i]);
        EXPECT_LE(std::abs(groups[largest].worth[i] - x), groups[largest].scale * 1.01);
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
    std::vector<double> row;
    for (std::int64_t i = 0; i < 32; ++i) row.push_back(row_element(key, i, DType::bf16));
    for (std::uint64_t i = 0; i < 32; ++i) {
      const auto first = row.begin() + static_cast<std::ptrdiff_t>(i / 16 * 16);
      double largest = 0;
      for (auto x = first; x != first + 16; ++x) largest = std::max(largest, std::abs(*x));
      const auto mantissa = static_cast<std::size_t>((largest - 0.5) * 256);
      const auto byte = static_cast<int>(row_word(key, i / 16, shape) >> (8 * (i % 16 / 2)) & 0xFF);
      const int bits = i % 2 == 0 ? byte & 15 : byte >> 4;
      const auto own = static_cast<std::size_t>((std::abs(row[i]) - 0.5) * 256);
      EXPECT_EQ(bits, groups[mantissa].bytes[own + (row[i] < 0 ? 128 : 0)]);
      EXPECT_EQ(row_word(key, 2, shape) >> (8 * (i / 16)) & 0xFF, groups[mantissa].scale_bits);
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
        const double x = row_element(key, static_cast<std::int64_t>(i), DType::bf16);
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
