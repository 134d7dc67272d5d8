// Hits that are not allowed, first and resumed rows, and what a recording does not list.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tests/properties/audit/audited.h"

namespace lockstep {
namespace {

// A step that runs one request alone; it samples a token.
RecordedStep step_of(std::int64_t number, const RecordedScheduled& row, std::int32_t token) {
  RecordedStep step;
  step.step = number;
  step.scheduled = {row};
  step.running = {row.id};
  step.sampled = {{row.id, {token}}};
  step.free_blocks = -1;
  return step;
}

RecordedEvent reset(bool succeeded, bool resets_running = false) {
  RecordedEvent event;
  event.kind = RecordedEvent::Kind::reset_prefix_cache;
  event.reset_succeeded = succeeded;
  event.resets_running = resets_running;
  return event;
}

// Blocks of 4 tokens. Request b hits block 1, which a has filled in the previous step.
Recording hit_after_the_end() {
  Recording recording = recording_of_one_group("0.33.0", 4, 20);
  recording.steps = {step_of(0, scheduled_row("a", 0, 8, {{{BlockId{1}, BlockId{2}}}}), 7),
                     step_of(1, scheduled_row("b", 4, 4, {{{BlockId{1}, BlockId{3}}}}), 7)};
  recording.steps[0].before = {added_request("a", 8, 1)};
  recording.steps[0].stopped = {{"a", "length"}};
  recording.steps[1].before = {added_request("b", 8, 1)};
  recording.steps[1].finished = {"a"};
  recording.steps[1].stopped = {{"b", "length"}};
  recording.end.steps = 2;
  return recording;
}

// Request a computes two prompt blocks, and then its second token.
Recording one_that_runs() {
  Recording recording = recording_of_one_group("0.33.0", 4, 20);
  recording.steps = {step_of(0, scheduled_row("a", 0, 8, {{{BlockId{1}, BlockId{2}}}}), 7),
                     step_of(1, scheduled_row("a", 8, 1), 7)};
  recording.steps[1].scheduled[0].blocks = {{BlockId{3}}};
  recording.steps[0].before = {added_request("a", 8, 2)};
  recording.steps[1].stopped = {{"a", "length"}};
  recording.end.steps = 2;
  return recording;
}

// Request a is preempted and resumed in step 1; it hits its own prompt.
Recording one_that_resumes() {
  Recording recording = one_that_runs();
  recording.steps[1].preempted = {"a"};
  recording.steps[1].scheduled = {
      scheduled_row("a", 8, 1, {{{BlockId{1}, BlockId{2}, BlockId{3}}}})};
  recording.steps[1].scheduled[0].resumed = true;
  return recording;
}

void expect_clean(const Recording& recording) {
  for (const AuditFinding& finding : audit(recording, AuditScope::whole_recording))
    ADD_FAILURE() << line_of(finding);
}

void expect_only(const Recording& recording, const std::string& line) {
  const std::vector<AuditFinding> findings = audit(recording, AuditScope::whole_recording);
  ASSERT_EQ(findings.size(), 1u) << line;
  EXPECT_EQ(line_of(findings[0]), line);
  EXPECT_EQ(group_of(findings[0].rule), RuleGroup::memory);
}

// What the audit of the whole recording leaves out.
std::vector<std::string> not_checked(const Recording& recording) {
  Auditor auditor(recording.header, AuditScope::whole_recording);
  for (const RecordedStep& step : recording.steps) auditor.step(step);
  auditor.end(recording.end);
  for (const AuditFinding& finding : auditor.take_findings()) ADD_FAILURE() << line_of(finding);
  return auditor.not_checked();
}

constexpr const char* kHitAfterReset =
    "audit.forbidden_hit step 1 request b group 0 token 0 entry 0 block 1: 4 tokens are hit, and "
    "block 1 is from before the reset of the prefix cache in step ";

TEST(ForbiddenHits, AHitOfABlockFromBeforeTheResetIsFound) {
  Recording recording = hit_after_the_end();
  expect_clean(recording);
  recording.steps[1].before.insert(recording.steps[1].before.begin(), reset(false));
  expect_clean(recording);
  recording.steps[1].before[0] = reset(true);
  expect_only(recording,
              std::string(kHitAfterReset) + "1; request a has had the block since step 0");
  // Between the decision of step 0 and its output.
  recording.steps[1].before.erase(recording.steps[1].before.begin());
  recording.steps[0].during = {reset(true)};
  expect_only(recording,
              std::string(kHitAfterReset) + "0; request a has had the block since step 0");
  // Before the blocks were allocated.
  recording.steps[0].during.clear();
  recording.steps[0].before.insert(recording.steps[0].before.begin(), reset(true));
  expect_clean(recording);
}

TEST(ForbiddenHits, ARunningRequestKeepsItsBlocksOverAReset) {
  Recording recording = one_that_runs();
  recording.steps[1].before = {reset(true)};
  expect_clean(recording);
}

TEST(ForbiddenHits, ARequestThatAResetPreemptedHitsNoneOfItsOwnBlocks) {
  Recording recording = one_that_resumes();
  recording.steps[1].before = {reset(true, true)};
  expect_only(recording,
              "audit.forbidden_hit step 1 request a group 0 token 0 entry 0 block 1: 8 tokens are "
              "hit, and block 1 is from before the reset of the prefix cache in step 1; request a "
              "has had the block since step 0");
  RecordedScheduled& row = recording.steps[1].scheduled[0];
  row.computed = 0;
  row.tokens = 9;
  expect_clean(recording);
}

// The connector has nothing: the hit is local.
TEST(ForbiddenHits, OfAConnectorsRequestsAreFound) {
  Recording recording = hit_after_the_end();
  recording.header.connector.emplace();
  for (RecordedStep& step : recording.steps) step.skipped.emplace();
  recording.steps[1].connector = {{{"b", 4, 0, false}}};
  expect_clean(recording);
  recording.steps[0].during = {reset(true)};
  expect_only(recording,
              std::string(kHitAfterReset) + "0; request a has had the block since step 0");
  recording.steps[0].during.clear();
  recording.steps[1].before[0].request.skip_reading_prefix_cache = true;
  expect_only(recording,
              "audit.forbidden_hit step 1 request b: 4 tokens are hit, and the request has "
              "skip_reading_prefix_cache");
}

TEST(ForbiddenHits, ARequestThatDoesNotReadTheCacheHitsNothing) {
  Recording recording = hit_after_the_end();
  recording.steps[1].before[0].request.skip_reading_prefix_cache = true;
  expect_only(recording,
              "audit.forbidden_hit step 1 request b: 4 tokens are hit, and the request has "
              "skip_reading_prefix_cache");
}

TEST(ForbiddenHits, NothingIsHitWithPrefixCachingOff) {
  Recording recording = hit_after_the_end();
  recording.header.options.config.enable_prefix_caching = false;
  expect_only(recording,
              "audit.forbidden_hit step 1 request b: 4 tokens are hit, and prefix caching is off: "
              "enable_prefix_caching");
}

TEST(Starts, AFirstRowIsNewAndNotResumed) {
  Recording recording = one_that_runs();
  expect_clean(recording);
  recording.steps[0].scheduled[0].resumed = true;
  expect_only(recording,
              "audit.starts step 0 request a: its first row is resumed: the worker never had it");
  recording.steps[0].scheduled[0].is_new = recording.steps[0].scheduled[0].resumed = false;
  expect_only(recording,
              "audit.starts step 0 request a: its row is not new, and the worker has no blocks of "
              "it");
}

TEST(Starts, ARunningRequestIsNotNewAgain) {
  Recording recording = one_that_resumes();
  expect_clean(recording);
  recording.steps[1].preempted.clear();
  expect_only(recording,
              "audit.starts step 1 request a: its row is new, and it runs: no step reports that it "
              "was preempted");
  recording = one_that_runs();
  recording.steps[1].scheduled[0].resumed = true;
  expect_only(recording,
              "audit.starts step 1 request a: its row is resumed, and it runs: the worker would "
              "replace its table");
}

TEST(Starts, ARequestThatWasPreemptedIsResumed) {
  Recording recording = one_that_resumes();
  recording.steps[1].scheduled[0].resumed = false;
  expect_only(recording,
              "audit.starts step 1 request a: was preempted, and its row is new without being "
              "resumed");
  recording = one_that_runs();
  recording.steps[1].before = {reset(true, true)};
  EXPECT_EQ(audit(recording)[0].what, "its row is not new, and the worker has no blocks of it");
}

TEST(Queues, OnlyLiveRequestsAreInAQueueAndEndOnce) {
  Recording recording = hit_after_the_end();
  recording.steps[1].waiting = {"c"};
  expect_only(recording,
              "audit.queues step 1 request c: is in the waiting queue, and no live request has "
              "this name");
  recording.steps[1].waiting.clear();
  recording.steps[1].running = {"b", "a"};
  expect_only(recording,
              "audit.queues step 1 request a: is in the running queue, and no live request has "
              "this name");
  recording.steps[1].running = {"b"};
  recording.steps[1].finished = {"a", "a"};
  expect_only(recording,
              "audit.queues step 1 request a: is reported finished, and no live request has this "
              "name");
}

TEST(Queues, ASkippedRequestIsLiveAndAnEndHasAReasonOfTheFormat) {
  Recording recording = hit_after_the_end();
  recording.steps[1].skipped = {{{"c", "WAITING"}}};
  expect_only(
      recording,
      "audit.queues step 1 request c: is in the skipped queue, and no live request has this "
      "name");
  recording = one_that_runs();
  recording.steps[1].stopped = {{"a", "because"}};
  EXPECT_EQ(audit(recording)[0].what, "ends by `because`, an unknown reason");
}

TEST(Queues, EachEventOfARequestHappensOnce) {
  const std::string ended = "audit.queues step 1 request b: is ended by an output, and had ended ";
  Recording recording = hit_after_the_end();
  recording.steps[1].stopped.push_back({"b", "length"});
  expect_only(recording, ended + "before");
  recording = hit_after_the_end();
  RecordedEvent abort;
  abort.kind = RecordedEvent::Kind::abort;
  abort.name = "b";
  recording.steps[1].during = {abort};
  expect_only(recording, ended + "before");
  // The output may be the one that arrived before the client disconnected.
  RecordedEvent output;
  output.kind = RecordedEvent::Kind::output;
  recording.steps[1].during = {output, abort};
  expect_clean(recording);
  recording = hit_after_the_end();
  recording.steps[1].running = {"b", "b"};
  expect_only(recording, "audit.queues step 1 request b: is in the running queue twice");
  recording = one_that_resumes();
  recording.steps[1].preempted = {"a", "a"};
  expect_only(recording, "audit.queues step 1 request a: is preempted, and does not run");
}

// Request a, of an engine without a profile, samples a token in every step.
Recording one_without_profile(std::int64_t num_steps) {
  Recording recording = recording_of_one_group("1", 64, 20);
  recording.header.engine.name = "mine";
  recording.header.options.config.max_model_len = 128;
  for (std::int64_t i = 0; i < num_steps; ++i)
    recording.steps.push_back(step_of(
        i, scheduled_row("a", i == 0 ? 0 : static_cast<std::int32_t>(7 + i), i == 0 ? 8 : 1), 7));
  recording.steps[0].scheduled[0].is_new = true;
  recording.steps[0].scheduled[0].blocks = {{BlockId{1}}};
  recording.steps[0].before = {added_request("a", 8, 20)};
  recording.end.steps = num_steps;
  return recording;
}

RecordedStep empty_step(std::int64_t number, std::int64_t free_blocks) {
  RecordedStep step;
  step.step = number;
  step.free_blocks = free_blocks;
  return step;
}

TEST(Queues, ADroppedRequestOfAnEngineWithoutAProfileIsFoundIfItReportsEnds) {
  Recording recording = one_without_profile(2);
  recording.steps[1].before = {added_request("b", 8, 1)};
  recording.steps[1].waiting = {"b"};
  recording.steps.push_back(empty_step(2, 19));
  recording.steps[2].finished = {"a", "b"};
  EXPECT_EQ(not_checked(recording).at(0),
            "whether a client is notified of each end: no step lists `stopped`");
  recording.steps[1].stopped = {{"a", "abort"}};
  const auto findings = audit(recording, AuditScope::whole_recording);
  ASSERT_EQ(findings.size(), 2u);
  EXPECT_EQ(line_of(findings[1]),
            "audit.queues step 2 request b: is reported finished after 0 of its 8 tokens, and "
            "neither an output nor its client has ended it: no client is notified");
  // Any step may show that the engine reports ends, also a later one.
  recording.steps[1].stopped.clear();
  recording.steps.push_back(step_of(3, scheduled_row("c", 0, 8, {{{BlockId{1}}}}), 7));
  recording.steps[3].before = {added_request("c", 8, 1)};
  recording.steps[3].stopped = {{"c", "length"}};
  EXPECT_EQ(audit(recording, AuditScope::whole_recording).size(), 2u);
}

TEST(Queues, AnEngineWithoutAProfileRunsARequestOnceAfterItsAbort) {
  Recording recording = one_without_profile(2);
  RecordedEvent abort;
  abort.kind = RecordedEvent::Kind::abort;
  abort.name = "a";
  recording.steps[1].before = {abort};
  recording.steps[1].stopped = {{"a", "abort"}};
  recording.steps.push_back(empty_step(2, 19));
  recording.steps[2].finished = {"a"};
  expect_clean(recording);
  recording = one_without_profile(3);
  recording.steps[1].before = {abort};
  expect_only(
      recording,
      "audit.scheduled_tokens step 2 request a token 10: is scheduled, and an output or its client "
      "has ended it");
}

TEST(Queues, AnEngineWithoutAProfileReportsAnEndToTheWorker) {
  Recording recording = one_without_profile(2);
  recording.steps[0].before[0].request.max_tokens = 2;
  recording.steps[1].stopped = {{"a", "length"}};
  recording.steps.push_back(empty_step(2, -1));
  expect_clean(recording);  // it may be late
  recording.steps.push_back(empty_step(3, -1));
  recording.steps[3].finished = {"a"};
  expect_clean(recording);
  recording.steps[3].finished.clear();
  expect_only(recording,
              "audit.queues step 3 request a: has ended, and the worker is not notified: it keeps "
              "its row");
}

TEST(Queues, ARequestThatAResetPreemptedIsReportedToTheWorkerSince0Point25Point1) {
  Recording recording = one_that_resumes();
  recording.steps[1].before = {reset(true, true)};
  recording.steps[1].scheduled[0].computed = 0;
  recording.steps[1].scheduled[0].tokens = 9;
  expect_clean(recording);
  recording.steps[1].preempted.clear();
  expect_only(recording,
              "audit.queues step 1 request a: was preempted by a reset, and the worker is not "
              "notified: it keeps its row");
  recording.header.engine.version = "0.22.1";
  expect_clean(recording);
}

TEST(NotChecked, ARecordingThatListsNoQueueIsNotAccused) {
  Recording recording = one_that_runs();
  for (RecordedStep& step : recording.steps) step.running.clear();
  recording.steps[1].free_blocks = 16;
  recording.steps[1].tables = {{{"a", {{BlockId{1}, BlockId{2}, BlockId{3}}}}}};
  const auto left_out = not_checked(recording);
  ASSERT_EQ(left_out.size(), 1u);
  EXPECT_EQ(left_out[0], "the queue of each request: the recording does not list its queues");
  // One queue that has a request: the recording lists its queues.
  recording.steps[1].running = {"a"};
  expect_only(recording,
              "audit.queues step 0 request a: has 0 of its 8 tokens computed and is in no queue: "
              "nothing runs it again");
  // A request that never runs is in no queue.
  recording.steps.resize(1);
  recording.steps[0].scheduled.clear();
  recording.steps[0].sampled.clear();
  recording.end.steps = 1;
  expect_only(recording,
              "audit.queues step 0 request a: has 0 of its 8 tokens computed and is in no queue: "
              "nothing runs it again");
}

TEST(NotChecked, LostBlocksNeedFreeBlocksAndAllTables) {
  Recording recording = one_that_runs();
  ASSERT_EQ(not_checked(recording).size(), 1u);
  EXPECT_EQ(not_checked(recording)[0],
            "lost blocks: no step shows all blocks that are held and free");
  recording.steps[0].free_blocks = 17;
  EXPECT_EQ(not_checked(recording).size(), 1u);
  recording.steps[0].tables = {{{"a", {{BlockId{1}, BlockId{2}}}}}};
  EXPECT_TRUE(not_checked(recording).empty());
}

TEST(Policy, APausedSchedulerSchedulesNoRequestOrAdmitsNone) {
  Recording recording = one_that_runs();
  RecordedEvent pause;
  pause.kind = RecordedEvent::Kind::pause_state;
  pause.pause_state = PauseState::paused_new;
  recording.steps[1].before = {pause};
  EXPECT_TRUE(audit(recording, AuditScope::whole_recording).empty());  // it ran before
  recording.steps[1].before[0].pause_state = PauseState::paused_all;
  auto findings = audit(recording, AuditScope::whole_recording);
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_EQ(findings[0].what, "is scheduled while PAUSED_ALL is set");
  recording.steps[0].before.push_back(pause);
  recording.steps[1].before.clear();
  findings = audit(recording, AuditScope::whole_recording);
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_EQ(findings[0].what, "is scheduled while PAUSED_NEW is set");
}

TEST(Policy, ARunningRequestThatNothingHindersIsScheduledAgain) {
  Recording recording = one_without_profile(1);
  for (std::int64_t i = 1; i < 40; ++i) {
    recording.steps.push_back(empty_step(i, 18));
    recording.steps.back().running = {"a"};
  }
  const auto num_findings = [&] { return audit(recording, AuditScope::whole_recording).size(); };
  const auto findings = audit(recording, AuditScope::whole_recording);
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_EQ(line_of(findings[0]),
            "audit.standstill step 16 request a: runs with 8 of its 9 tokens computed, and no step "
            "has scheduled it since step 0: no output of it is in flight, and 18 of 19 blocks are "
            "free");
  EXPECT_EQ(group_of(findings[0].rule), RuleGroup::policy);
  // Another one decodes in every step.
  recording.steps[1].before = {added_request("b", 8, 100)};
  for (std::int64_t i = 1; i < 40; ++i) {
    RecordedStep& step = recording.steps[i];
    step.running = {"a", "b"};
    step.free_blocks = 17;
    step.scheduled = {scheduled_row("b", i == 1 ? 0 : static_cast<std::int32_t>(6 + i), 1)};
    step.sampled = {{"b", {7}}};
  }
  recording.steps[1].scheduled = {scheduled_row("b", 0, 8, {{{BlockId{2}}}})};
  EXPECT_EQ(num_findings(), 0u) << "the limits of a step are unknown";
  recording.header.options.given = {"max_num_seqs", "max_num_batched_tokens"};
  recording.header.options.config.max_num_batched_tokens = 8;
  EXPECT_EQ(num_findings(), 1u);
  recording.header.options.config.max_num_seqs = 2;
  EXPECT_EQ(num_findings(), 1u);
  recording.header.options.config.max_num_batched_tokens = 1;
  recording.steps[0].scheduled[0].tokens = 8;
  EXPECT_EQ(audit(recording, AuditScope::whole_recording).back().rule, AuditRule::limits);
  recording.header.options.config.max_num_batched_tokens = 8;
  for (RecordedStep& step : recording.steps) step.free_blocks = 0;
  EXPECT_EQ(num_findings(), 0u);
}

TEST(Policy, ARunningRequestMayWaitForItsOutputAndForItsTurn) {
  Recording recording = one_without_profile(1);
  recording.header.options.config.async_scheduling = true;
  for (std::int64_t i = 1; i < 40; ++i) {
    recording.steps.push_back(empty_step(i, 18));
    recording.steps.back().running = {"a"};
  }
  EXPECT_TRUE(audit(recording, AuditScope::whole_recording).empty());
  recording.steps[2].output_of_step = 0;
  EXPECT_EQ(audit(recording, AuditScope::whole_recording).size(), 1u);
  recording = one_without_profile(1);
  for (std::int64_t i = 1; i < 64; ++i) {
    recording.steps.push_back(empty_step(i, 18));
    if (i % 8 == 0)
      recording.steps.back() =
          step_of(i, scheduled_row("a", static_cast<std::int32_t>(7 + i / 8), 1), 7);
    recording.steps.back().running = {"a"};
  }
  EXPECT_TRUE(audit(recording, AuditScope::whole_recording).empty());
}

TEST(Policy, BlocksThatTheTokensDoNotNeedAreAPolicy) {
  Recording recording = one_that_runs();
  (*recording.steps[0].scheduled[0].blocks)[0].push_back(BlockId{3});
  recording.steps[1].scheduled[0].blocks.reset();
  const auto findings = audit(recording, AuditScope::whole_recording);
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_EQ(findings[0].rule, AuditRule::excess_blocks);
  EXPECT_EQ(group_of(findings[0].rule), RuleGroup::policy);
}

TEST(Policy, ARowHasSpaceForOneStateWhereNoneIsKept) {
  Recording recording = one_that_runs();
  recording.header.groups[0].spec.kind = CacheKind::mamba;
  recording.header.groups[0].spec.mamba_cache_mode = MambaCacheMode::none;
  recording.steps[0].scheduled[0].blocks = {{{BlockId{1}}}};
  recording.steps[1].scheduled[0].blocks.reset();
  expect_clean(recording);
  recording.steps[0].scheduled[0].blocks = {{{BlockId{1}, BlockId{2}}}};
  const auto findings = audit(recording, AuditScope::whole_recording);
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_EQ(findings[0].rule, AuditRule::excess_blocks);
}

}  // namespace
}  // namespace lockstep
