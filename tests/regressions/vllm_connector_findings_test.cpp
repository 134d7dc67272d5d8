// Defects of vLLM's scheduler with a KV connector (docs/findings.md), each in its smallest case.
// The case is a recording in this folder: vLLM's profile decides exactly as recorded, and the audit
// reports the defect. A run of a deadlock ends stuck.
//
// LOCKSTEP_UPDATE=1 writes the recordings.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "properties/audit/audit.h"
#include "sim/conform/conform.h"
#include "sim/recording/run_recorder.h"
#include "sim/session/session.h"
#include "tests/support/scripted_workload.h"

namespace lockstep {
namespace {

constexpr std::int64_t kNumBlocks = 6;  // five of 4 tokens, and the null block

using Groups = std::vector<KVCacheGroupSpec>;

EngineConfig engine_config() {
  EngineConfig engine;
  engine.engine = "vllm-0.22.1";
  engine.max_num_seqs = 4;
  engine.max_num_batched_tokens = 64;
  engine.max_model_len = 20;
  engine.block_size = 4;
  return engine;
}

EngineConfig asynchronous() {
  EngineConfig engine = engine_config();
  engine.async_scheduling = true;
  return engine;
}

Groups full_attention() {
  Groups groups(1);
  groups[0].layer_names = {"layers.0"};
  groups[0].spec.block_size = 4;
  groups[0].spec.head_size = 8;
  return groups;
}

Groups beside_a_window_of_three_blocks() {
  Groups groups = full_attention();
  groups.push_back(groups.front());
  groups[1].layer_names = {"layers.1"};
  groups[1].spec.kind = CacheKind::sliding_window;
  groups[1].spec.sliding_window = 12;
  return groups;
}

Groups one_window(std::int64_t sliding_window) {
  Groups groups = full_attention();
  groups[0].spec.kind = CacheKind::sliding_window;
  groups[0].spec.sliding_window = sliding_window;
  return groups;
}

// Runs the script until nothing moves; the recording, and its outcome.
void run(ScriptedConnector& connector, const std::vector<ScriptedWorkload::Turnful>& script,
         std::string& recorded, RunSummary& summary, const Groups& groups = full_attention(),
         std::int64_t num_blocks = kNumBlocks, const EngineConfig& engine = engine_config()) {
  ScriptedWorkload workload(script);
  workload.use(connector);
  std::string lines;
  RunRecorder recorder(workload,
                       [&](const RecordedStep& step) { lines += recording_step_line(step); });
  auto decisions = Scheduler::create(engine, groups, num_blocks,
                                     {recorder.connector(), KVLoadFailurePolicy::recompute});
  ASSERT_TRUE(decisions) << decisions.error().message;
  auto plan = plan_for_groups(groups, num_blocks);
  ASSERT_TRUE(plan) << plan.error().message;
  LockstepConfig config;
  config.engine = engine;
  config.backend = make_backend_config(engine, *plan);
  RecordingHeader header = recording_header(engine, groups, num_blocks, *decisions);
  header.connector = {.fail_on_load_error = false, .supports_hybrid_groups = true};
  const auto report = run_lockstep(config, {*decisions, recorder, {}, &recorder});
  ASSERT_TRUE(report) << report.error().message;
  RecordingEnd end = recorder.end();
  std::ranges::sort(end.unfinished);
  recorded = recording_header_line(header) + lines + recording_end_line(end);
  summary = report->summary;
}

// The profile decides as the recording in this folder, and the audit of it has one finding.
void expect_kept(const std::string& recorded, const std::string& file_name, bool is_stuck,
                 const std::string& what) {
  const std::string path = std::string(LOCKSTEP_SOURCE_DIR) + "/tests/regressions/" + file_name;
  if (std::getenv("LOCKSTEP_UPDATE") != nullptr) std::ofstream(path) << recorded;
  std::ifstream file(path);
  std::stringstream kept;
  kept << file.rdbuf();
  EXPECT_EQ(kept.str(), recorded) << file_name << " is not what the case gives";
  const auto conformed = conform_recording(path);
  ASSERT_TRUE(conformed) << conformed.error().message;
  EXPECT_FALSE(conformed->mismatch) << conformed->mismatch->what;
  EXPECT_EQ(conformed->is_stuck, is_stuck);
  const auto audited = audit_recording(path);
  ASSERT_TRUE(audited) << audited.error().message;
  ASSERT_EQ(audited->findings.size(), 1u);
  EXPECT_EQ(audited->findings[0].what, what);
}

// The engine serves all of the script and notices nothing; the audit of it says `what`.
template <class... Engine>
void expect_wrong(ScriptedConnector& connector,
                  const std::vector<ScriptedWorkload::Turnful>& script,
                  const std::string& file_name, const std::string& what, const Engine&... engine) {
  std::string recorded;
  RunSummary summary;
  ASSERT_NO_FATAL_FAILURE(run(connector, script, recorded, summary, engine...));
  EXPECT_EQ(summary.verdict, Verdict::agreed);
  expect_kept(recorded, file_name, false, what);
}

void expect_deadlock(ScriptedConnector& connector,
                     const std::vector<ScriptedWorkload::Turnful>& script,
                     const std::string& file_name, const std::string& circle) {
  std::string recorded;
  RunSummary summary;
  ASSERT_NO_FATAL_FAILURE(run(connector, script, recorded, summary));
  EXPECT_EQ(summary.verdict, Verdict::liveness);
  EXPECT_EQ(summary.stuck_total, 2);
  EXPECT_EQ(summary.wait_cycle, circle);
  expect_kept(recorded, file_name, true, "nothing runs again: " + circle);
}

TEST(VllmConnectorFindings, WhoCountsOnAnotherToComputeALostBlockIsLeftAloneWithIt) {
  ScriptedConnector connector;
  connector.answers["first"] = {{.num_tokens = 8, .is_async = false}};
  connector.invalid[0] = {BlockId{2}};
  expect_wrong(
      connector,
      {{ScriptedWorkload::add("first", seeded_prompt(1, 10), 2),
        ScriptedWorkload::add("second", seeded_prompt(1, 9), 1)},
       {ScriptedWorkload::abort("first")}},
      "vllm_0_22_1_lost_block_left_alone.jsonl",
      "attention of tokens [8, 9) reads token 4 from slot 0 of block 2, which holds nothing "
      "that was written since the block was allocated: the load of step 0 is reported not to have "
      "filled it; request first has had the block since step 0");
}

TEST(VllmConnectorFindings, ALoadedRequestStandsBehindOneThatDoesNotFit) {
  ScriptedConnector connector;
  connector.answers["large"] = {{.num_tokens = std::nullopt}, {}};
  connector.answers["loaded"] = {{.num_tokens = 8, .is_async = true}};
  connector.received[1] = {"loaded"};
  expect_deadlock(connector,
                  {{ScriptedWorkload::add("large", seeded_prompt(1, 16), 1),
                    ScriptedWorkload::add("loaded", seeded_prompt(2, 8), 1)},
                   {},
                   {}},
                  "vllm_0_22_1_loaded_behind_large.jsonl",
                  "large waits for 4 blocks more, and 3 of 5 are free; loaded (2 blocks, held "
                  "since step 0) waits after it in the queue: none of them can continue");
}

// What vLLM 0.33.0 itself decided: with every block free it begins no load, in step after step.
void expect_no_load(const std::string& file_name, int finding, std::int64_t from_step) {
  const std::string path = std::string(LOCKSTEP_SOURCE_DIR) + "/tests/regressions/" + file_name;
  const auto conformed = conform_recording(path);
  ASSERT_TRUE(conformed) << conformed.error().message;
  EXPECT_FALSE(conformed->mismatch) << conformed->mismatch->what;
  const auto repaired = conform_recording(path, "vllm-0.33.0,without=" + std::to_string(finding));
  ASSERT_TRUE(repaired) << repaired.error().message;
  ASSERT_TRUE(repaired->mismatch);
  EXPECT_EQ(repaired->mismatch->step, from_step);
}

TEST(VllmConnectorFindings, ALoadWaitsForRoomForDraftsThatThePoolNeverHas) {
  expect_no_load("vllm_0_33_0_load_waits_for_room_for_drafts.jsonl", 35, 1);
}

TEST(VllmConnectorFindings, ARequestWhoseLoadFailedLeavesRoomForItself) {
  expect_no_load("vllm_0_33_0_load_leaves_room_for_itself.jsonl", 36, 2);
}

// The decisions of vLLM 0.33.0 itself: r0 needs two pages and the host has one; r1, which needs
// one, is queued after it.
TEST(VllmConnectorFindings, LoadsFillTheHostPoolAndNobodyGoesOn) {
  const std::string path = std::string(LOCKSTEP_SOURCE_DIR) +
                           "/tests/regressions/vllm_0_33_0_loads_fill_the_host_pool.jsonl";
  const auto conformed = conform_recording(path);
  ASSERT_TRUE(conformed) << conformed.error().message;
  EXPECT_FALSE(conformed->mismatch) << conformed->mismatch->what;
  EXPECT_TRUE(conformed->is_stuck);
  EXPECT_EQ(
      conformed->wait_cycle,
      "r0 (1 block, held since step 0) waits for 2 blocks more on the host, and 1 of 4 are free; "
      "r1 (2 blocks, held since step 0) waits after it in the queue: none of them can continue");
  const auto recording = read_recording(path);
  ASSERT_TRUE(recording) << recording.error().message;
  for (const RecordedStep& step : recording->steps) {
    EXPECT_TRUE(step.scheduled.empty());
    EXPECT_EQ(step.pages.value().free_host_blocks, 1);
    EXPECT_EQ(step.free_blocks, 32);
  }
  EXPECT_EQ(recording->end.unfinished, (std::vector<std::string>{"r0", "r1"}));
  EXPECT_FALSE(recording->steps.back().loading);  // both loads have completed
}

// The page that it loads into has a block on the device, and no transfer brings it there.
TEST(VllmConnectorFindings, ALoadWithinAStepIsNotRestoredToTheDevice) {
  const std::string path =
      std::string(LOCKSTEP_SOURCE_DIR) +
      "/tests/regressions/vllm_0_33_0_load_within_a_step_is_not_restored.jsonl";
  const auto conformed = conform_recording(path);
  ASSERT_TRUE(conformed) << conformed.error().message;
  EXPECT_FALSE(conformed->mismatch) << conformed->mismatch->what;
  const auto recording = read_recording(path);
  ASSERT_TRUE(recording) << recording.error().message;
  const RecordedStep& step = recording->steps.front();
  EXPECT_EQ(step.scheduled.at(0).computed, 4);
  const RecordedPages& pages = step.pages.value();
  EXPECT_TRUE(pages.transfers.empty());
  EXPECT_TRUE(pages.all_resident);
  EXPECT_EQ(pages.residency.at(0).second.blocks.at(0), (std::vector{BlockId{2}, BlockId{4}}));
}

TEST(VllmConnectorFindings, TwoRequestsHaveLoadedPartsAndEachNeedsWhatTheOtherHolds) {
  ScriptedConnector connector;
  connector.answers["first"] = {{.num_tokens = 4, .is_async = true}};
  connector.answers["second"] = {{.num_tokens = 8, .is_async = true}};
  connector.received[1] = {"first", "second"};
  expect_deadlock(
      connector,
      {{ScriptedWorkload::add("first", seeded_prompt(1, 16), 1),
        ScriptedWorkload::add("second", seeded_prompt(2, 16), 1)},
       {},
       {}},
      "vllm_0_22_1_two_half_loaded.jsonl",
      "first (1 block, held since step 0) waits for 3 blocks more, and 2 of 5 are free; second (2 "
      "blocks, held since step 0) waits after it in the queue: none of them can continue");
}

// Six blocks are free: two of a hit in full attention, then two of the window's, then two others.
// The load's block of full attention is taken before the window's hit is touched.
TEST(VllmConnectorFindings, TheBlocksOfALoadEvictWhatAnotherGroupHasHit) {
  ScriptedConnector connector;
  connector.answers["reader"] = {{.num_tokens = 4, .is_async = true}};
  connector.received[3] = {"reader"};
  expect_wrong(
      connector,
      {{ScriptedWorkload::add("writer", seeded_prompt(1, 8), 1)},
       {ScriptedWorkload::add("other", seeded_prompt(2, 4), 1)},
       {ScriptedWorkload::add("reader", seeded_prompt(1, 12), 1)},
       {},
       {}},
      "vllm_0_22_1_load_evicts_hit.jsonl",
      "attention of tokens [11, 12) reads token 4 from slot 0 of block 4, which holds token "
      "8 of request reader; the block is not one of this group; request reader has had the block "
      "since step 2, request writer before it, since step 0",
      beside_a_window_of_three_blocks(), 7);
}

TEST(VllmConnectorFindings, APromptThatIsLoadedWholeLacksTheWindowOfItsLastToken) {
  ScriptedConnector connector;
  connector.answers["loaded"] = {{.num_tokens = 8, .is_async = true}};
  connector.received[0] = {"loaded"};
  expect_wrong(connector, {{ScriptedWorkload::add("loaded", seeded_prompt(1, 8), 1)}, {}},
               "vllm_0_22_1_window_of_last_token.jsonl",
               "attention reads a token that has no block: the table has the null block there",
               one_window(5));
}

// The same finding after a window: the block that `first` computes in the step is hit in the step,
// and the lost block before it is in no other table.
TEST(VllmConnectorFindings, WhoHitsWhatAVoidRowWasToComputeKeepsItsAnswer) {
  ScriptedConnector connector;
  connector.answers["first"] = {{.num_tokens = 8, .is_async = false}};
  connector.answers["second"] = {{.num_tokens = 0, .is_async = false}};
  connector.invalid[0] = {BlockId{1}};
  expect_wrong(connector,
               {{ScriptedWorkload::add("first", seeded_prompt(1, 13), 1),
                 ScriptedWorkload::add("second", seeded_prompt(1, 13), 1)},
                {ScriptedWorkload::abort("first")}},
               "vllm_0_22_1_hit_of_void_row.jsonl",
               "attention of tokens [12, 13) reads token 8 from slot 0 of block 2, which holds "
               "nothing that was written since the block was allocated; request first has had the "
               "block since step 0",
               one_window(5), 8);
}

TEST(VllmConnectorFindings, WhoGoesBackToALostBlockHasLetGoOfTheWindowBeforeIt) {
  ScriptedConnector connector;
  connector.answers["loaded"] = {{.num_tokens = 8, .is_async = false}};
  connector.invalid[0] = {BlockId{1}};
  expect_wrong(connector, {{ScriptedWorkload::add("loaded", seeded_prompt(1, 9), 1)}, {}},
               "vllm_0_22_1_back_without_window.jsonl",
               "attention reads a token that has no block: the table has the null block there",
               one_window(5));
}

// Its second token is sampled from its first one, which is void, and after a block that holds
// nothing; and it is delivered as the first.
TEST(VllmConnectorFindings, WhatIsInFlightBehindALostBlockIsKept) {
  ScriptedConnector connector;
  connector.answers["loaded"] = {{.num_tokens = 4, .is_async = false}};
  connector.invalid[0] = {BlockId{1}};
  expect_wrong(connector, {{ScriptedWorkload::add("loaded", seeded_prompt(1, 5), 2)}, {}},
               "vllm_0_22_1_in_flight_behind_lost_block.jsonl",
               "tokens [5, 6) were scheduled before it was known that the previous step read a "
               "block that a load did not fill, and what they sample is kept",
               full_attention(), kNumBlocks, asynchronous());
}

// The step in flight frees the lost block, which is then in no table.
TEST(VllmConnectorFindings, WhoHasLeftALostBlockBehindKeepsItsAnswer) {
  ScriptedConnector connector;
  connector.answers["loaded"] = {{.num_tokens = 8, .is_async = false}};
  connector.invalid[0] = {BlockId{1}};
  expect_wrong(connector, {{ScriptedWorkload::add("loaded", seeded_prompt(1, 11), 2)}, {}},
               "vllm_0_22_1_lost_block_left_behind.jsonl",
               "tokens [11, 12) were scheduled before it was known that the previous step read a "
               "block that a load did not fill, and what they sample is kept",
               one_window(4), kNumBlocks, asynchronous());
}

// The request of the lost block is preempted before the loss is known: it is not among the running
// requests.
TEST(VllmConnectorFindings, WhoIsPreemptedBeforeItsLossIsKnownKeepsItsAnswer) {
  ScriptedConnector connector;
  connector.answers["second"] = {{.num_tokens = 4, .is_async = false},
                                 {.num_tokens = 0, .is_async = false}};
  connector.invalid[0] = {BlockId{3}};
  expect_wrong(connector,
               {{ScriptedWorkload::add("first", seeded_prompt(1, 8), 2),
                 ScriptedWorkload::add("second", seeded_prompt(2, 5), 2)},
                {}},
               "vllm_0_22_1_preempted_before_loss_is_known.jsonl",
               "tokens [4, 6) are scheduled, but only 5 are known and 0 drafted", full_attention(),
               5, asynchronous());
}

}  // namespace
}  // namespace lockstep
