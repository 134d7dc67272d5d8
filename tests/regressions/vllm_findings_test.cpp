// Defects of vLLM itself that the audit found in its recordings (docs/findings.md), each in its
// smallest case. The case is a recording in this folder: vLLM's profile decides exactly as
// recorded, the audit reports the defect, and the profile of the release that fixed it decides
// without harm.
//
// LOCKSTEP_UPDATE=1 writes the recordings.
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <sstream>

#include "properties/audit/auditor.h"
#include "sim/conform/conform.h"
#include "sim/recording/run_recorder.h"
#include "sim/session/session.h"
#include "tests/support/scripted_workload.h"

namespace lockstep {
namespace {

struct Case {
  EngineConfig engine;
  std::vector<KVCacheGroupSpec> groups;
  std::int64_t num_blocks = 0;
  std::vector<ScriptedWorkload::Turnful> script;
};

KVCacheGroupSpec group(const std::string& layer, CacheKind kind, std::int64_t block_size) {
  KVCacheGroupSpec group;
  group.layer_names = {layer};
  group.spec.kind = kind;
  group.spec.block_size = block_size;
  group.spec.head_size = 8;
  if (kind == CacheKind::mamba) {
    group.spec.mamba_cache_mode = MambaCacheMode::align;
    group.spec.states = {{{4}, DType::fp32}};
  }
  return group;
}

EngineConfig engine_of_findings() {
  EngineConfig engine;
  engine.max_num_seqs = 4;
  engine.max_num_batched_tokens = 64;
  engine.max_model_len = 64;
  engine.block_size = 4;
  engine.mamba_cache_mode = MambaCacheMode::align;
  return engine;
}

// A request computes 12 tokens; another with the same 12 and one more comes after it.
Case state_hit_longer_than_attention() {
  Case c;
  c.engine = engine_of_findings();
  c.engine.num_spec_tokens = 1;
  c.engine.spec_method = SpecMethod::eagle;
  c.groups = {group("layers.0", CacheKind::full_attention, 4),
              group("layers.1", CacheKind::mamba, 4)};
  c.groups[1].spec.num_speculative_blocks = 1;
  c.num_blocks = 16;
  c.script = {{ScriptedWorkload::add("writer", seeded_prompt(1, 12), 1)},
              {},
              {},
              {ScriptedWorkload::add("reader", seeded_prompt(1, 13), 1)}};
  return c;
}

// A request computes 12 tokens in one chunk, so no state is saved at token 8; another with the same
// prompt comes while it runs.
Case second_full_group_not_cut() {
  Case c;
  c.engine = engine_of_findings();
  c.groups = {group("layers.0", CacheKind::full_attention, 4),
              group("layers.1", CacheKind::mamba, 4),
              group("layers.2", CacheKind::hidden_state, 8)};
  c.num_blocks = 24;
  c.script = {{ScriptedWorkload::add("writer", seeded_prompt(1, 12), 3)},
              {ScriptedWorkload::add("reader", seeded_prompt(1, 12), 1)}};
  return c;
}

struct Recorded {
  std::string text;
  std::vector<AuditFinding> findings;
};

void record(Case c, const std::string& engine, Recorded& recorded) {
  c.engine.engine = engine;
  auto decisions = Scheduler::create(c.engine, c.groups, c.num_blocks);
  ASSERT_TRUE(decisions) << decisions.error().message;
  auto plan = plan_for_groups(c.groups, c.num_blocks);
  ASSERT_TRUE(plan) << plan.error().message;
  LockstepConfig config;
  config.engine = c.engine;
  config.backend = make_backend_config(c.engine, *plan);
  const RecordingHeader header = recording_header(c.engine, c.groups, c.num_blocks, *decisions);
  Auditor auditor(header);
  recorded.text = recording_header_line(header);
  ScriptedWorkload script(c.script, c.engine.num_spec_tokens);
  RunRecorder recorder(script, [&](const RecordedStep& step) {
    auditor.step(step);
    recorded.text += recording_step_line(step);
  });
  const auto report = run_lockstep(config, {*decisions, recorder, {}, &recorder});
  ASSERT_TRUE(report) << report.error().message;
  recorded.text += recording_end_line(recorder.end());
  recorded.findings = auditor.take_findings();
}

void expect_case(const Case& c, const std::string& file_name, const std::string& what) {
  Recorded old_release;
  ASSERT_NO_FATAL_FAILURE(record(c, "vllm-0.22.1", old_release));
  ASSERT_EQ(old_release.findings.size(), 1u) << old_release.text;
  EXPECT_EQ(old_release.findings[0].request, "reader");
  EXPECT_NE(old_release.findings[0].what.find(what), std::string::npos)
      << old_release.findings[0].what;

  const std::string path = std::string(LOCKSTEP_SOURCE_DIR) + "/tests/regressions/" + file_name;
  if (std::getenv("LOCKSTEP_UPDATE") != nullptr) std::ofstream(path) << old_release.text;
  std::ifstream file(path);
  std::stringstream kept;
  kept << file.rdbuf();
  EXPECT_EQ(kept.str(), old_release.text) << file_name << " is not what the case gives";
  const auto conformed = conform_recording(path);
  ASSERT_TRUE(conformed) << conformed.error().message;
  EXPECT_FALSE(conformed->mismatch) << conformed->mismatch->what;

  Recorded new_release;
  ASSERT_NO_FATAL_FAILURE(record(c, "vllm-0.33.0", new_release));
  EXPECT_TRUE(new_release.findings.empty()) << new_release.findings[0].what;
}

TEST(VllmFindings, WithEagleAStateHitIsLongerThanTheAttentionHitBesideIt) {
  expect_case(state_hit_longer_than_attention(), "vllm_0_22_1_state_hit_longer.jsonl",
              "reads token 8 from slot 0");
}

TEST(VllmFindings, ASecondFullAttentionGroupKeepsBlocksBeyondTheCommonHit) {
  expect_case(second_full_group_not_cut(), "vllm_0_22_1_second_group_not_cut.jsonl",
              "it will be written while shared");
}

}  // namespace
}  // namespace lockstep
