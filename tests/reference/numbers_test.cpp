// What an 8-bit cache holds of a number: values known by hand, order, symmetry, and how far a
// stored number may be from the one that it stands for.
#include "reference/numbers.h"

#include <gtest/gtest.h>

#include <cmath>

#include "reference/attention_oracle.h"
#include "reference/content.h"

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
  const WordShape shape{.stored = stored.bytes.data()};
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

}  // namespace
}  // namespace lockstep
