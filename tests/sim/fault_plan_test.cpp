// A plan of faults as it is written down, and what a reader refuses.
#include "sim/engine/faults.h"

#include <gtest/gtest.h>

namespace lockstep {
namespace {

std::string refusal_of(std::string_view text) {
  const auto plan = fault_plan_from_text(text);
  return plan ? std::string() : plan.error().message;
}

TEST(FaultPlan, IsTheSameFromItsLineAndFromItsFile) {
  const auto plan = fault_plan_from_text(
      "refuse_allocation@12+3,pinch_pool@20+8:4,abort_decode@5:1,abort_again@9,late_output@0");
  ASSERT_TRUE(plan) << plan.error().message;
  ASSERT_EQ(plan->faults().size(), 5u);
  EXPECT_EQ(plan->faults()[1], (PlannedFault{FaultKind::pinch_pool, 20, 8, 4}));
  const auto again = fault_plan_of(faults_of(*plan));
  ASSERT_TRUE(again) << again.error().message;
  EXPECT_EQ(*again, *plan);
  std::string text;
  for (const PlannedFault& fault : plan->faults())
    text += (text.empty() ? "" : ",") + to_text(fault);
  EXPECT_EQ(*fault_plan_from_text(text), *plan);
}

TEST(FaultPlan, EveryKindHasANameThatLeadsBackToIt) {
  for (std::size_t i = 0; i < kNumFaultKinds; ++i) {
    const PlannedFault fault{.kind = static_cast<FaultKind>(i), .step = 3, .number = 0};
    const auto plan = fault_plan_from_text(to_text(fault));
    ASSERT_TRUE(plan) << plan.error().message;
    EXPECT_EQ(plan->faults()[0].kind, fault.kind);
  }
}

TEST(FaultPlan, TheTightestOfTheFaultsOfAStepLimitsThePool) {
  const auto plan = fault_plan_from_text("pinch_pool@2+4:5,pinch_pool@3+1:9,refuse_allocation@5+2");
  ASSERT_TRUE(plan);
  constexpr std::int64_t kNoLimit = std::numeric_limits<std::int64_t>::max();
  const std::int64_t expected[] = {kNoLimit, kNoLimit, 5, 5, 5, 0, 0, kNoLimit};
  for (std::int64_t step = 0; step < 8; ++step)
    EXPECT_EQ(plan->blocks_in_use_max(step), expected[step]) << step;
}

TEST(FaultPlan, WhatNobodyKnowsIsRefusedWithWhatIsExpected) {
  EXPECT_NE(refusal_of("explode@3").find("unknown fault explode"), std::string::npos);
  EXPECT_NE(refusal_of("abort_decode").find("KIND@STEP"), std::string::npos);
  EXPECT_NE(refusal_of("").find("KIND@STEP"), std::string::npos);
  EXPECT_NE(refusal_of("abort_decode@").find("expected a number"), std::string::npos);
  EXPECT_NE(refusal_of("abort_decode@3+2").find("takes no argument steps"), std::string::npos);
  EXPECT_NE(refusal_of("pinch_pool@3+2").find("argument blocks"), std::string::npos);
  EXPECT_NE(refusal_of("refuse_allocation@3+2:1").find("takes no number"), std::string::npos);
  EXPECT_NE(refusal_of("refuse_allocation@3+0").find("expected 1 to"), std::string::npos);
  EXPECT_NE(refusal_of("refuse_allocation@3+5000").find("expected 1 to"), std::string::npos);
  EXPECT_NE(refusal_of("abort_decode@-3").find("step -3"), std::string::npos);
  EXPECT_NE(refusal_of("abort_decode@3:-1").find("negative"), std::string::npos);
  EXPECT_NE(refusal_of("abort_decode@99999999999999999999").find("number"), std::string::npos);
}

}  // namespace
}  // namespace lockstep
