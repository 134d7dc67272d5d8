// The oracle of states on numbers that can be followed by hand.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "reference/memory/page_image.h"
#include "reference/memory/state_numbers.h"

namespace lockstep {
namespace {

KVCacheSpec spec_with(std::vector<StateTensorSpec> states, std::int64_t num_drafts = 0) {
  KVCacheSpec spec;
  spec.kind = CacheKind::mamba;
  spec.states = std::move(states);
  spec.num_speculative_blocks = num_drafts;
  return spec;
}

TEST(StateNumbers, ATensorIsAConvolutionWhereItsRowsMakeAWidthOf2To4) {
  const auto rule = [](std::vector<std::int64_t> dims, std::int64_t drafts, std::int32_t layer) {
    return state_numbers(spec_with({{std::move(dims), DType::fp32}}, drafts), 0, {.layer = layer})
        ->rule;
  };
  EXPECT_EQ(rule({3, 8}, 0, 0), StateRule::convolution);
  EXPECT_EQ(rule({6, 8}, 3, 0), StateRule::convolution);
  EXPECT_EQ(rule({3, 8}, 3, 0), StateRule::selective);
  EXPECT_EQ(rule({4, 8}, 0, 1), StateRule::gated_delta);
  EXPECT_EQ(rule({2, 3, 8}, 0, 2), StateRule::selective);
  EXPECT_EQ(rule({8}, 0, 3), StateRule::gated_delta);
}

TEST(StateNumbers, ElementsAreNumbersOfTheirFormat) {
  const std::uint8_t half[] = {0x00, 0x3C}, smallest[] = {0x01, 0x00}, infinite[] = {0x00, 0xFC};
  EXPECT_EQ(number_at(half, DType::fp16), 1.0);
  EXPECT_EQ(number_at(smallest, DType::fp16), std::ldexp(1.0, -24));
  EXPECT_EQ(number_at(infinite, DType::fp16), -INFINITY);
  const std::uint8_t brain[] = {0xC0, 0xBF};
  EXPECT_EQ(number_at(brain, DType::bf16), -1.5);
}

// Three inputs and two tokens: a window of two after one accepted draft.
TEST(StateNumbers, AConvolutionKeepsTheSequenceFromWhereItIsTold) {
  const auto of = state_numbers(spec_with({{{3, 2}, DType::fp32}}, 1), 0, {});
  ASSERT_TRUE(of);
  ASSERT_EQ(of->width, 3);
  std::vector<std::uint8_t> before(24);
  for (std::size_t i = 0; i < before.size(); ++i) before[i] = static_cast<std::uint8_t>(i);
  std::vector<std::uint8_t> after(24, 0xEE);
  const std::vector<ContentId> contents = {11, 12};
  keep_inputs(*of, {before, 1}, contents, 1, after);
  std::vector<std::uint8_t> tokens(16);
  draw_row(11, coordinate(0, 64, 0), word_shape(DType::fp32), std::span(tokens).first(8));
  draw_row(12, coordinate(0, 64, 0), word_shape(DType::fp32), std::span(tokens).last(8));
  EXPECT_TRUE(std::equal(before.begin() + 16, before.end(), after.begin()));
  EXPECT_TRUE(std::equal(tokens.begin(), tokens.end(), after.begin() + 8));
}

// One head of one row and one column: h = h decay + dt x B, y = C h + x / 2.
TEST(StateNumbers, ASelectiveStateOfOneNumberFollowsItsFormula) {
  const auto of = state_numbers(spec_with({{{1, 1, 1}, DType::fp32}}), 0, {.layer = 2});
  ASSERT_TRUE(of);
  const auto drawn = [&](ContentId content, std::int64_t part) {
    std::vector<std::uint8_t> bytes(4);
    draw_row(content, coordinate(2, 64 + part, 0), word_shape(DType::fp32), bytes);
    return number_at(bytes.data(), DType::fp32);
  };
  const float start = 0.25;
  std::vector<std::uint8_t> state(4);
  std::memcpy(state.data(), &start, 4);
  Recurrence recurrence(*of, state, false);
  double h = start;
  for (const ContentId content : {5u, 6u, 7u}) {
    recurrence.advance(content);
    const double dt = std::log(1 + std::exp(drawn(content, 3) - 1));
    h = h * std::exp(-0.25 * dt) + dt * drawn(content, 0) * drawn(content, 1);
    EXPECT_NEAR(recurrence.value(0), h, 1e-14);
    EXPECT_NEAR(recurrence.outputs().values[0], drawn(content, 2) * h + drawn(content, 0) / 2,
                1e-14);
    EXPECT_LT(recurrence.bound(0), 1e-5);
  }
}

// With one column k has length one: what beta leaves of the old state, and beta of the new value.
TEST(StateNumbers, ADeltaRuleOfOneNumberForgetsAsMuchAsItLearns) {
  const auto of = state_numbers(spec_with({{{1, 1, 1}, DType::fp32}}), 0, {.layer = 1});
  ASSERT_TRUE(of);
  Recurrence recurrence(*of, {}, false);
  const auto bits = [&](std::int64_t part, std::uint32_t keep, std::uint32_t set) {
    std::vector<std::uint8_t> bytes(4);
    draw_row(9, coordinate(1, 64 + part, 0), WordShape{.keep = keep, .set = set}, bytes);
    return number_at(bytes.data(), DType::fp32);
  };
  recurrence.advance(9);
  const double v = bits(2, 0x807FFFFF, 0x3F000000), beta = bits(4, 0x007FFFFF, 0x3F000000);
  const double k = bits(1, 0x807FFFFF, 0x3F000000);
  const double factor = k / std::sqrt(k * k + 1e-6);
  EXPECT_GE(beta, 0.5);
  EXPECT_LT(beta, 1.0);
  EXPECT_NEAR(recurrence.value(0), beta * v * factor, 1e-14);
  EXPECT_LT(bits(3, 0x007FFFFF, 0xBE000000), 0);
}

}  // namespace
}  // namespace lockstep
