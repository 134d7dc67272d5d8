// Findings 10, 11 and 38 of docs/findings.md: defects of vLLM's scheduler without a wrong read.
// This folder has each release's decisions in the smallest case, or a case.
#include <gtest/gtest.h>

#include <string>

#include "cuda_backend/backends.h"
#include "properties/judge/judge.h"
#include "properties/judge/known_findings.h"
#include "properties/shrink/case_parts.h"
#include "sim/conform/conform.h"

namespace lockstep {
namespace {

class VllmSchedulingFindings : public testing::TestWithParam<std::string> {
 protected:
  // What this release recorded; the profile must agree with all of it.
  Recording recorded(const std::string& what) const {
    const std::string path =
        LOCKSTEP_SOURCE_DIR "/tests/regressions/vllm_" + GetParam() + "_" + what + ".jsonl";
    const auto conformed = conform_recording(path);
    EXPECT_TRUE(conformed) << conformed.error().message;
    EXPECT_FALSE(conformed->mismatch) << conformed->mismatch->what;
    auto recording = read_recording(path);
    EXPECT_TRUE(recording) << recording.error().message;
    return std::move(*recording);
  }
  static SavedCase served(Recording recording) {
    const auto saved = case_of("finding", std::move(recording));
    EXPECT_TRUE(saved) << saved.error().message;
    const auto timed = on_a_clock(*saved);
    EXPECT_TRUE(timed) << timed.error().message;
    return *timed;
  }
};

// 10. Five tokens, three of them drafts' places, took a second block and two for drafts; four
// tokens need one block fewer than there are. vLLM 0.22.1 asserts that this cannot be: its
// recording ends before step 2.
TEST_P(VllmSchedulingFindings, AStepWithFewerDraftsNeedsFewerStateBlocksThanItHas) {
  const Recording recording = recorded("fewer_drafts");
  ASSERT_GE(recording.steps.size(), 2u);
  const RecordedStep& last_with_drafts = recording.steps[1];
  const auto num_held = std::ssize((*last_with_drafts.tables)[0].blocks[1]);
  const std::int64_t tokens_of_step_2 = 3 + 1;  // computed, and the one that was sampled
  EXPECT_EQ(num_held, 4);
  EXPECT_LT((tokens_of_step_2 + 3) / 4 + 2, num_held);
  const bool stops = GetParam() == "0_22_1";
  EXPECT_EQ(recording.steps.size(), stops ? 2u : 3u);
  EXPECT_EQ(recording.end.unfinished.size(), stops ? 1u : 0u);
}

// 11. The request that has progressed further is preempted by the other, and neither ever ends.
TEST_P(VllmSchedulingFindings, RequestsOfOnePriorityAndArrivalPreemptEachOtherForEver) {
  const Recording recording = recorded("equal_arrivals");
  ASSERT_EQ(recording.steps.size(), 18u);
  for (std::size_t step = 4; step + 9 < recording.steps.size(); ++step) {
    const RecordedStep& now = recording.steps[step];
    const RecordedStep& nine_later = recording.steps[step + 9];
    EXPECT_EQ(now.running, nine_later.running) << step;
    EXPECT_EQ(now.preempted, nine_later.preempted) << step;
    EXPECT_EQ(now.free_blocks, nine_later.free_blocks) << step;
  }
  const SavedCase tie = served(recording);
  const Outcome outcome = judge(tie);
  EXPECT_EQ(outcome.kind, OutcomeKind::stuck) << outcome.what;
  ASSERT_NE(known_finding(tie, outcome), nullptr);
  EXPECT_EQ(known_finding(tie, outcome)->number, 11);
}

TEST_P(VllmSchedulingFindings, AnOrderAmongEqualsOrAReserveOrACacheEndsTheTie) {
  const SavedCase tie = served(recorded("equal_arrivals"));
  const auto expect_end = [&](const char* with, auto change) {
    SavedCase other = tie;
    change(other);
    ASSERT_NE(other, tie) << with;
    EXPECT_EQ(judge(other).kind, OutcomeKind::agreed) << with;
  };
  expect_end("one later",
             [](SavedCase& other) { trace_requests_of(other)[1]->spec.arrival_ns += 1; });
  expect_end("fcfs", [](SavedCase& other) { other.engine.policy = SchedulingPolicy::fcfs; });
  expect_end("room for whole prompts",
             [](SavedCase& other) { other.engine.scheduler_reserve_full_isl = true; });
  expect_end("prefix caching", [](SavedCase& other) { other.engine.enable_prefix_caching = true; });
}

// 38. vLLM 0.33.0 does not start. With only its constructor repaired it would allocate the blocks
//     of the sinks: the model that keeps them, with that defect planted.
TEST(VllmSinks, TheFirstRequestIsGivenTheBlocksOfSinks) {
  auto saved = read_saved_case(LOCKSTEP_SOURCE_DIR
                               "/tests/regressions/vllm_0_33_0_sinks_given_away.case.jsonl");
  ASSERT_TRUE(saved) << saved.error().message;
  const Outcome outcome = judge(*saved, make_simt_backend);
  EXPECT_EQ(outcome.check, "invariant.ref_cnt") << outcome.what;
  EXPECT_EQ(outcome.step, 0);
  JudgeOptions options{.backend = make_simt_backend};
  options.invariants = false;
  EXPECT_EQ(judge(*saved, options).kind, OutcomeKind::divergence);
  saved->mutants.clear();
  EXPECT_EQ(judge(*saved, make_simt_backend).kind, OutcomeKind::agreed);
  saved->engine.engine = "vllm-0.33.0";
  EXPECT_EQ(judge(*saved).kind, OutcomeKind::refused);
}

INSTANTIATE_TEST_SUITE_P(Releases, VllmSchedulingFindings, testing::Values("0_22_1", "0_33_0"),
                         [](const auto& release) { return "vllm_" + release.param; });

}  // namespace
}  // namespace lockstep
