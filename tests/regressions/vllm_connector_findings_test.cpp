// Defects of vLLM's scheduler with a KV connector (docs/findings.md), each in the smallest case
// that still shows it. The case is a recording beside this file: vLLM's profile decides exactly so,
// and the audit says what is wrong. A run of a deadlock ends stuck.
//
// LOCKSTEP_UPDATE=1 writes the recordings anew.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "sim/audit/audit.h"
#include "sim/conform/conform.h"
#include "sim/lockstep.h"
#include "sim/run_recorder.h"
#include "tests/support/scripted_workload.h"

namespace lockstep {
namespace {

constexpr std::int64_t kNumBlocks = 6;  // five of 4 tokens, and the null block

EngineConfig engine_config() {
  EngineConfig engine;
  engine.engine = "vllm-0.22.1";
  engine.max_num_seqs = 4;
  engine.max_num_batched_tokens = 64;
  engine.max_model_len = 20;
  engine.block_size = 4;
  return engine;
}

std::vector<KVCacheGroupSpec> full_attention() {
  std::vector<KVCacheGroupSpec> groups(1);
  groups[0].layer_names = {"layers.0"};
  groups[0].spec.block_size = 4;
  groups[0].spec.head_size = 8;
  return groups;
}

// Runs the script until nothing moves; the recording, and what became of it.
void run(ScriptedConnector& connector, const std::vector<ScriptedWorkload::Turnful>& script,
         std::string& recorded, RunSummary& summary) {
  ScriptedWorkload workload(script);
  workload.use(connector);
  const EngineConfig engine = engine_config();
  const std::vector<KVCacheGroupSpec> groups = full_attention();
  std::string lines;
  RunRecorder recorder(workload,
                       [&](const RecordedStep& step) { lines += recording_step_line(step); });
  auto decisions = make_reference_decisions(engine, groups, kNumBlocks,
                                            {recorder.connector(), KVLoadFailurePolicy::recompute});
  ASSERT_TRUE(decisions) << decisions.error().message;
  auto plan = plan_for_groups(groups, kNumBlocks);
  ASSERT_TRUE(plan) << plan.error().message;
  LockstepConfig config;
  config.engine = engine;
  config.device = make_device_config(engine, *plan);
  RecordingHeader header = recording_header(engine, groups, kNumBlocks, **decisions);
  header.connector = {.fail_on_load_error = false, .supports_hybrid_groups = true};
  const auto report = run_lockstep(config, **decisions, recorder, nullptr, &recorder);
  ASSERT_TRUE(report) << report.error().message;
  RecordingEnd end = recorder.end();
  std::ranges::sort(end.unfinished);
  recorded = recording_header_line(header) + lines + recording_end_line(end);
  summary = report->summary;
}

// The profile decides as the recording beside this file says, and the audit of it has one finding.
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

void expect_deadlock(ScriptedConnector& connector,
                     const std::vector<ScriptedWorkload::Turnful>& script,
                     const std::string& file_name, const std::string& circle) {
  std::string recorded;
  RunSummary summary;
  ASSERT_NO_FATAL_FAILURE(run(connector, script, recorded, summary));
  EXPECT_EQ(summary.verdict, Verdict::liveness);
  EXPECT_EQ(summary.stuck_total, 2);
  EXPECT_EQ(summary.wait_cycle, circle);
  expect_kept(recorded, file_name, true, "nothing runs any more: " + circle);
}

TEST(VllmConnectorFindings, who_counts_on_another_to_compute_a_lost_block_is_left_alone_with_it) {
  ScriptedConnector connector;
  connector.answers["first"] = {{.num_tokens = 8, .is_async = false}};
  connector.invalid[0] = {BlockId{2}};
  std::string recorded;
  RunSummary summary;
  ASSERT_NO_FATAL_FAILURE(run(connector,
                              {{ScriptedWorkload::add("first", seeded_prompt(1, 10), 2),
                                ScriptedWorkload::add("second", seeded_prompt(1, 9), 1)},
                               {ScriptedWorkload::abort("first")}},
                              recorded, summary));
  EXPECT_EQ(summary.verdict, Verdict::agreed);
  expect_kept(
      recorded, "vllm_0_22_1_lost_block_left_alone.jsonl", false,
      "attention of tokens [8, 9) reads token 4 from slot 0 of block 2, which holds nothing "
      "that was written since the block was handed out");
}

TEST(VllmConnectorFindings, a_loaded_request_stands_behind_one_that_does_not_fit) {
  ScriptedConnector connector;
  connector.answers["large"] = {{.num_tokens = std::nullopt}, {}};
  connector.answers["loaded"] = {{.num_tokens = 8, .is_async = true}};
  connector.received[1] = {"loaded"};
  expect_deadlock(
      connector,
      {{ScriptedWorkload::add("large", seeded_prompt(1, 16), 1),
        ScriptedWorkload::add("loaded", seeded_prompt(2, 8), 1)},
       {},
       {}},
      "vllm_0_22_1_loaded_behind_large.jsonl",
      "large waits for 4 blocks more, and 3 of 5 are free; loaded (2 blocks, held since "
      "step 0) waits behind it in the queue: none of them can go on");
}

TEST(VllmConnectorFindings, two_requests_have_loaded_parts_and_each_needs_what_the_other_holds) {
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
      "first (1 block, held since step 0) waits for 3 blocks more, and 2 of 5 are free; "
      "second (2 blocks, held since step 0) waits behind it in the queue: none of them "
      "can go on");
}

}  // namespace
}  // namespace lockstep
