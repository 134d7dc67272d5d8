// Defects of vLLM that the audit found in recordings of vLLM's own loop (docs/findings.md), each in
// its smallest case. The case is a recording of that release in this folder: its profile decides
// exactly as recorded, and the audit reports the defect.
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "properties/audit/audit.h"
#include "properties/judge/judge.h"
#include "properties/judge/known_findings.h"
#include "properties/shrink/case_parts.h"
#include "sim/conform/conform.h"

namespace lockstep {
namespace {

// The audit's findings in a recording that the profile decides the same way.
std::vector<AuditFinding> findings_of(const std::string& file_name) {
  const std::string path = std::string(LOCKSTEP_SOURCE_DIR) + "/tests/regressions/" + file_name;
  const auto conformed = conform_recording(path);
  EXPECT_TRUE(conformed) << conformed.error().message;
  if (conformed) {
    EXPECT_FALSE(conformed->mismatch) << conformed->mismatch->what;
  }
  const auto audited = audit_recording(path);
  EXPECT_TRUE(audited) << audited.error().message;
  return audited ? audited->findings : std::vector<AuditFinding>();
}

// Expects one finding with these words; returns its audit rule.
AuditRule expect_finding(const std::string& file_name, std::int64_t step,
                         const std::string& request, const std::string& what) {
  const std::vector<AuditFinding> findings = findings_of(file_name);
  EXPECT_EQ(findings.size(), 1u);
  if (findings.empty()) return {};
  EXPECT_EQ(findings[0].step, step);
  EXPECT_EQ(findings[0].request, request);
  EXPECT_NE(findings[0].what.find(what), std::string::npos) << findings[0].what;
  return findings[0].rule;
}

TEST(VllmServedFindings, ARequestPreemptedInItsOwnStepLeavesBlocksThatNobodyComputed) {
  for (const std::string release : {"0_22_1", "0_33_0"}) {
    SCOPED_TRACE(release);
    expect_finding("vllm_" + release + "_preempted_in_its_own_step.jsonl", 4, "low",
                   "attention of tokens [28, 33) reads token 24 from slot 0");
  }
}

TEST(VllmServedFindings, AWindowIsFreedByDraftsThatAreRejectedIn0221AndNotIn0330) {
  for (const std::string release : {"0_22_1", "0_33_0"}) {
    SCOPED_TRACE(release);
    const auto findings = findings_of("vllm_" + release + "_window_freed_by_drafts.jsonl");
    if (release == "0_33_0") {
      EXPECT_TRUE(findings.empty());
      continue;
    }
    ASSERT_FALSE(findings.empty());
    EXPECT_EQ(findings[0].step, 2);
    EXPECT_NE(findings[0].what.find("while request reader still reads it"), std::string::npos)
        << findings[0].what;
  }
}

// vLLM 0.33.0, driven to the case, decides it so, and so does its profile; which rule of the audit
// finds it, and where.
struct Expected {
  AuditRule rule;
  std::int64_t step;
  std::string request;
  std::string what;
};

void expect_audit(const std::string& file_name, const Expected& expected) {
  EXPECT_EQ(expect_finding(file_name, expected.step, expected.request, expected.what),
            expected.rule);
}

TEST(VllmServedFindings, StatesInFlightDoNotFitAPoolThatWasPlannedForThem) {
  expect_audit("vllm_0_33_0_states_in_flight_do_not_fit.jsonl",
               {AuditRule::standstill, 2, "r",
                "is preempted after 12 tokens though no other request holds a block"});
}

TEST(VllmServedFindings, ACheckpointIsExportedOverTheRunningState) {
  expect_audit("vllm_0_33_0_checkpoint_over_running_state.jsonl",
               {AuditRule::state_read, 2, "r",
                "the state after 16 tokens is read from block 6, which holds the inputs of the "
                "convolution after 12 tokens"});
}

TEST(VllmServedFindings, TheStateOfAHitIsPublishedUnderALongerPrefix) {
  expect_audit("vllm_0_33_0_state_under_longer_prefix.jsonl",
               {AuditRule::state_read, 8, "reader",
                "the state after 4 tokens is read from block 12, which holds the one after 2 "
                "tokens of request short"});
}

TEST(VllmServedFindings, AHitOfAPartOfABlockNeedsMoreThanIsPlanned) {
  expect_audit("vllm_0_33_0_partial_hit_not_let_in.jsonl",
               {AuditRule::standstill, 5, "longer", "and this request is not admitted"});
}

TEST(VllmServedFindings, APromptOfOneTokenTakesTheDraftsItWasPaddedWithIntoItsState) {
  expect_audit("vllm_0_33_0_padded_prompt_of_one_token.jsonl",
               {AuditRule::state_read, 5, "one",
                "the state after 1 tokens is read from block 8, which holds the one after 2 "
                "tokens of request one"});
}

TEST(VllmServedFindings, AWindowIsComputedAgainFromTheLastTokenOfABlockThatWasLetGo) {
  expect_audit("vllm_0_33_0_replay_into_null_block.jsonl",
               {AuditRule::token_write, 1, "b", "a token is written to the null block"});
}

TEST(VllmServedFindings, AStateBeforeAGapIsKeptAndAPoolPlannedForItHasNoRoom) {
  expect_audit("vllm_0_28_0_state_before_gap_is_kept.jsonl",
               {AuditRule::planned_blocks, 3, "r", "4 states of group 0 are held"});
  expect_audit("vllm_0_28_0_state_before_gap_does_not_fit.jsonl",
               {AuditRule::standstill, 3, "r",
                "is preempted after 24 tokens though no other request holds a block"});
}

TEST(VllmServedFindings, APaddedRequestThatIsCutKeepsItsDraftAndLosesATokenForIt) {
  const std::string file_name = "vllm_0_28_0_padded_request_is_cut.jsonl";
  const std::vector<AuditFinding> findings = findings_of(file_name);
  ASSERT_FALSE(findings.empty());
  EXPECT_EQ(findings[0].rule, AuditRule::scheduled_tokens);
  EXPECT_EQ(findings[0].step, 1);
  EXPECT_EQ(findings[0].request, "one");
  EXPECT_EQ(findings[0].what, "1 drafts are to be verified in a step of 1 tokens");
  const auto recording =
      read_recording(std::string(LOCKSTEP_SOURCE_DIR) + "/tests/regressions/" + file_name);
  ASSERT_TRUE(recording) << recording.error().message;
  ASSERT_GE(recording->steps.size(), 3u);
  // The draft that was never computed is subtracted from the computed tokens: the prompt is
  // computed twice.
  for (const std::size_t step : {1, 2}) {
    ASSERT_EQ(recording->steps[step].scheduled.size(), 2u);
    EXPECT_EQ(recording->steps[step].scheduled[1].computed, 0);
    EXPECT_EQ(recording->steps[step].scheduled[1].tokens, 1);
  }
}

// What was recorded, as a case of the model.
SavedCase served(const std::string& file_name) {
  auto recording =
      read_recording(std::string(LOCKSTEP_SOURCE_DIR) + "/tests/regressions/" + file_name);
  EXPECT_TRUE(recording) << recording.error().message;
  const auto saved = case_of("finding", std::move(*recording));
  EXPECT_TRUE(saved) << saved.error().message;
  auto timed = on_a_clock(*saved);
  EXPECT_TRUE(timed) << timed.error().message;
  return std::move(*timed);
}

void expect_known(const SavedCase& saved, const std::string& check, int number) {
  const Outcome outcome = judge(saved);
  EXPECT_EQ(outcome.check, check) << outcome.what;
  ASSERT_NE(known_finding(saved, outcome), nullptr) << outcome.what;
  EXPECT_EQ(known_finding(saved, outcome)->number, number);
}

TEST(VllmServedFindings, TheModelOf0300AndOneThatDoesNotRunAheadKeepNoSuchState) {
  const SavedCase kept = served("vllm_0_28_0_state_before_gap_is_kept.jsonl");
  expect_known(kept, "invariant.planned_blocks", 20);
  SavedCase repaired = kept;
  repaired.engine.engine = "vllm-0.30.0";
  EXPECT_EQ(judge(repaired).kind, OutcomeKind::agreed);
  SavedCase in_turn = kept;
  in_turn.engine.async_scheduling = false;
  EXPECT_EQ(judge(in_turn).kind, OutcomeKind::agreed);
}

TEST(VllmServedFindings, TheModelCutsAPaddedRequestTooUnlessTwoTokensAreLetThrough) {
  const SavedCase cut = served("vllm_0_28_0_padded_request_is_cut.jsonl");
  expect_known(cut, "audit.scheduled_tokens", 21);
  SavedCase whole = cut;
  whole.engine.long_prefill_token_threshold = 2;
  EXPECT_EQ(judge(whole).kind, OutcomeKind::agreed);
}

// Right decisions of vLLM 0.33.0 that look wrong without their reason.
TEST(VllmServedFindings, WhatIsRightIsNotAccused) {
  for (const std::string name :
       {"hit_of_a_prefill_checkpoint", "window_is_computed_again", "nobody_is_let_in_by_a_pause",
        "name_used_again_at_its_end", "id_used_again_in_a_step", "ends_with_steps_in_flight"}) {
    SCOPED_TRACE(name);
    const auto audited =
        audit_recording(std::string(LOCKSTEP_SOURCE_DIR) + "/tests/regressions/" + name + ".jsonl");
    ASSERT_TRUE(audited) << audited.error().message;
    EXPECT_TRUE(audited->findings.empty()) << audited->findings[0].what;
    EXPECT_GT(audited->reads_checked, 0);
  }
}

// A step reports one request finished, and another arrives while it runs: the model gives it the
// id, which the loop still took for the finished one's.
TEST(VllmServedFindings, AnIdIsFreeForARequestThatArrivesInTheSameStep) {
  auto recording = read_recording(std::string(LOCKSTEP_SOURCE_DIR) +
                                  "/tests/regressions/id_used_again_in_a_step.jsonl");
  ASSERT_TRUE(recording) << recording.error().message;
  for (const Decides decide : {Decides::recording, Decides::model}) {
    const auto saved = case_of("id_used_again_in_a_step", *recording, decide);
    ASSERT_TRUE(saved) << saved.error().message;
    const Outcome outcome = judge(*saved);
    EXPECT_EQ(outcome.kind, OutcomeKind::agreed) << outcome.what;
  }
}

}  // namespace
}  // namespace lockstep
