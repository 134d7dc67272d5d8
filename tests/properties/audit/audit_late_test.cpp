// Drafts and outputs that come too late: only the request that uses them is reported.
#include <gtest/gtest.h>

#include <string>

#include "tests/properties/audit/audited.h"

namespace lockstep {
namespace {

Recording empty(bool is_async) {
  Recording recording = recording_of_one_group("0.33.0", 8, 8);
  recording.header.options.config.async_scheduling = is_async;
  recording.header.options.config.num_spec_tokens = is_async ? 0 : 2;
  recording.header.options.config.spec_method = SpecMethod::ngram;
  recording.header.has_held_drafts = !is_async;
  recording.header.has_stale_outputs = is_async;
  return recording;
}

RecordedEvent added(const std::string& name) { return added_request(name, 4, 9); }

// Step 0 computes two prompts and proposes drafts; step 1 verifies those of "a" alone, step 2 those
// of "b", which has kept them.
Recording drafted() {
  Recording recording = empty(false);
  RecordedStep first;
  first.before = {added("a"), added("b")};
  first.scheduled = {scheduled_row("a", 0, 4, {{{BlockId{1}}}}),
                     scheduled_row("b", 0, 4, {{{BlockId{2}}}})};
  first.running = {"a", "b"};
  first.free_blocks = 5;
  first.sampled = {{"a", {21}}, {"b", {31}}};
  first.drafts = {{{"a", {22, 23}}, {"b", {32, 33}}}};
  RecordedStep second = first;
  second.step = 1;
  second.before.clear();
  second.scheduled = {scheduled_row("a", 4, 3)};
  second.scheduled[0].spec = {22, 23};
  second.held_drafts = {{"b", {32, 33}}};
  second.sampled = {{"a", {22}}};
  second.drafts.reset();
  RecordedStep third = second;
  third.step = 2;
  third.scheduled = {scheduled_row("b", 4, 2)};
  third.scheduled[0].spec = {32};
  third.held_drafts.clear();
  third.sampled = {{"b", {32, 35}}};
  recording.steps = {first, second, third};
  recording.end = {.steps = 3, .unfinished = {"a", "b"}};
  return recording;
}

// The first finding, about `request` in `step`, and its sentence holds `what`.
void expect_first(const Recording& recording, AuditRule rule, std::int64_t step,
                  const std::string& request, const std::string& what) {
  const auto findings = audit(recording);
  ASSERT_FALSE(findings.empty()) << "expected: " << what;
  EXPECT_EQ(findings[0].rule, rule) << line_of(findings[0]);
  EXPECT_EQ(findings[0].step, step) << line_of(findings[0]);
  EXPECT_EQ(findings[0].request, request);
  EXPECT_NE(findings[0].what.find(what), std::string::npos) << findings[0].what;
}

TEST(AuditDrafts, ThatAreProposedKeptAndVerifiedAreClean) {
  const auto findings = audit(drafted());
  EXPECT_TRUE(findings.empty()) << line_of(findings[0]);
}

TEST(AuditDrafts, ThatNobodyProposedAreFound) {
  Recording recording = drafted();
  recording.steps[2].scheduled[0].spec = {34};
  expect_first(recording, AuditRule::drafts, 2, "b",
               "has 5 tokens and verifies the drafts [34], and step 0 proposed [32, 33]");
  recording.steps[2].scheduled[0].spec = {-1};
  expect_first(recording, AuditRule::drafts, 2, "b", "verifies the drafts [-1], and step 0");
  recording = drafted();
  (*recording.steps[0].drafts)[0].tokens.clear();
  expect_first(recording, AuditRule::drafts, 1, "a", "and none was proposed after them");
  // A padded row has drafts that were not proposed.
  recording.steps[1].scheduled[0].spec = {-1, -1};
  EXPECT_TRUE(audit(recording).empty());
}

TEST(AuditDrafts, OfARequestThatTheStepDidNotScheduleAreFound) {
  Recording recording = drafted();
  recording.steps[1].drafts = {{{"b", {40, 41}}}};
  expect_first(recording, AuditRule::drafts, 1, "b",
               "is given the drafts [40, 41], and no row of it was scheduled");
}

TEST(AuditDrafts, ThatAreKeptAreThoseThatWereProposed) {
  Recording recording = drafted();
  recording.steps[1].held_drafts = {{"b", {32, 34}}};
  expect_first(recording, AuditRule::drafts, 1, "b",
               "keeps the drafts [32, 34] for a later step, and step 0 proposed [32, 33]");
  recording.steps[1].held_drafts = {{"b", {32, 33, 34}}};
  expect_first(recording, AuditRule::drafts, 1, "b", "and the engine makes 2");
  recording.steps[1].held_drafts = {{"c", {5}}};
  expect_first(recording, AuditRule::drafts, 1, "c", "and there is no such request");
}

TEST(AuditDrafts, ThatOutliveAPreemptionAreFound) {
  Recording recording = drafted();
  recording.steps.pop_back();
  recording.steps[1].preempted = {"b"};
  recording.steps[1].running = {"a"};
  recording.steps[1].waiting = {"b"};
  expect_first(recording, AuditRule::drafts, 1, "b",
               "keeps the drafts [32, 33] for a later step, and was preempted in step 1");
  recording.steps[1].held_drafts.clear();
  EXPECT_TRUE(audit(recording).empty());
}

// With a step in flight: step 1 is decided before the output of step 0 is there, and preempts "b";
// its output arrives after step 1.
Recording overtaken() {
  Recording recording = empty(true);
  RecordedStep first;
  first.before = {added("a"), added("b")};
  first.scheduled = {scheduled_row("a", 0, 4, {{{BlockId{1}}}}),
                     scheduled_row("b", 0, 4, {{{BlockId{2}}}})};
  first.running = {"a", "b"};
  first.free_blocks = 5;
  first.sampled = {{"a", {21}}, {"b", {31}}};
  RecordedStep second;
  second.step = 1;
  second.scheduled = {scheduled_row("a", 4, 1)};
  second.preempted = {"b"};
  second.running = {"a"};
  second.waiting = {"b"};
  second.free_blocks = 6;
  second.sampled = {{"a", {22}}};
  second.output_of_step = 0;
  second.stale_outputs = {{"b", 0, 1}};
  RecordedStep third;
  third.step = 2;
  third.scheduled = {scheduled_row("a", 5, 1), scheduled_row("b", 0, 5, {{{BlockId{3}}}})};
  third.scheduled[1].resumed = true;
  third.running = {"a", "b"};
  third.free_blocks = 5;
  third.sampled = {{"a", {23}}, {"b", {32}}};
  third.output_of_step = 1;
  recording.steps = {first, second, third};
  recording.end = {.steps = 3, .unfinished = {"a", "b"}, .steps_in_flight = 1};
  return recording;
}

TEST(AuditStaleOutput, OfAPreemptedRequestMayBeTakenOrDropped) {
  Recording recording = overtaken();
  EXPECT_TRUE(audit(recording).empty());
  recording.steps[1].stale_outputs[0].taken = 0;
  recording.steps[2].scheduled[1].tokens = 4;
  const auto findings = audit(recording);
  EXPECT_TRUE(findings.empty()) << line_of(findings[0]);
}

TEST(AuditStaleOutput, ThatWasDroppedIsNotKnown) {
  Recording recording = overtaken();
  recording.steps[1].stale_outputs[0].taken = 0;
  expect_first(recording, AuditRule::scheduled_tokens, 2, "b",
               "tokens [0, 5) are scheduled, but only 4 are known");
}

TEST(AuditStaleOutput, BehindAResetIsDropped) {
  Recording recording = overtaken();
  RecordedEvent reset;
  reset.kind = RecordedEvent::Kind::reset_prefix_cache;
  reset.reset_succeeded = reset.resets_running = true;
  recording.steps[1].before = {reset};
  recording.steps[1].preempted = {"a", "b"};
  recording.steps[1].scheduled = {};
  recording.steps[1].running = {};
  recording.steps[1].waiting = {"a", "b"};
  recording.steps[1].free_blocks = 7;
  recording.steps[1].sampled = {};
  recording.steps[1].stale_outputs = {{"a", 0, 0}, {"b", 0, 0}};
  recording.steps.pop_back();
  recording.end = {.steps = 2, .unfinished = {"a", "b"}};
  EXPECT_TRUE(audit(recording).empty());
  recording.steps[1].stale_outputs[1].taken = 1;
  expect_first(recording, AuditRule::stale_output, 1, "b",
               "1 tokens of the output of step 0 are taken, which was to be dropped: a reset had "
               "preempted all running requests");
}

TEST(AuditStaleOutput, OfWhoHasLeftIsNotTaken) {
  Recording recording = overtaken();
  RecordedEvent abort;
  abort.kind = RecordedEvent::Kind::abort;
  abort.name = "b";
  recording.steps[1].before = {abort};
  recording.steps[1].preempted = {};
  recording.steps[1].finished = {"b"};
  recording.steps[1].waiting = {};
  recording.steps.pop_back();
  recording.end = {.steps = 2, .unfinished = {"a"}, .steps_in_flight = 1};
  expect_first(recording, AuditRule::stale_output, 1, "b",
               "1 tokens of the output of step 0 are taken, and the request had finished");
  // ... nor by the next one of its name.
  recording.steps[1].before = {abort, added("b")};
  recording.steps[1].waiting = {"b"};
  expect_first(recording, AuditRule::stale_output, 1, "b",
               "are taken, and none were sampled for it there: a request of that name has ended");
  recording.steps[1].stale_outputs.clear();
  EXPECT_TRUE(audit(recording).empty());
}

TEST(AuditStaleOutput, IsThatOfAStepInFlightAndWhole) {
  Recording recording = overtaken();
  recording.steps[2].stale_outputs = {{"b", 0, 1}};
  expect_first(recording, AuditRule::stale_output, 2, "b",
               "the output of step 0 is received, and it had arrived before");
  recording.steps[2].stale_outputs = {{"b", 2, 1}};
  expect_first(recording, AuditRule::stale_output, 2, "b",
               "the output of step 2 is received, and those up to step 1 have arrived");
  recording = overtaken();
  recording.steps[1].stale_outputs[0].taken = 3;
  expect_first(recording, AuditRule::stale_output, 1, "b", "and it has 1");
  recording = overtaken();
  recording.steps[1].stale_outputs = {{"a", 0, 0}};
  expect_first(recording, AuditRule::stale_output, 1, "a",
               "0 tokens of the output of step 0 are taken, of 1 that were sampled: it has "
               "continued since, without them");
}

}  // namespace
}  // namespace lockstep
