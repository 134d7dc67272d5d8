// What a run writes down conforms to the model that decided it, and its decisions do memory no
// harm.
#include "sim/recording/run_recorder.h"

#include <gtest/gtest.h>

#include <string>

#include "properties/audit/audit.h"
#include "sim/conform/conform.h"
#include "sim/session/session.h"
#include "tests/support/temporary_folder.h"
#include "traces/formats/request_trace.h"

namespace lockstep {
namespace {

struct Scenario {
  std::string name;
  EngineConfig engine;
  std::vector<KVCacheSpec> specs;
  std::int64_t num_blocks;
};

KVCacheSpec full(std::int64_t block_size) {
  KVCacheSpec spec;
  spec.block_size = block_size;
  return spec;
}

KVCacheSpec window(std::int64_t block_size, std::int64_t tokens) {
  KVCacheSpec spec = full(block_size);
  spec.kind = CacheKind::sliding_window;
  spec.sliding_window = tokens;
  return spec;
}

KVCacheSpec states(std::int64_t block_size, MambaCacheMode mode) {
  KVCacheSpec spec = full(block_size);
  spec.kind = CacheKind::mamba;
  spec.mamba_cache_mode = mode;
  spec.states = {{{3, 8}, DType::bf16}, {{2, 4, 4}, DType::fp32}};
  return spec;
}

std::vector<Scenario> scenarios() {
  EngineConfig engine;
  engine.engine = "vllm-0.22.1";
  engine.max_model_len = 4096;
  engine.max_num_batched_tokens = 512;
  engine.max_num_seqs = 16;
  EngineConfig align = engine;
  align.mamba_cache_mode = MambaCacheMode::align;
  EngineConfig async = engine;
  async.async_scheduling = true;
  EngineConfig drafts = engine;
  drafts.num_spec_tokens = 3;
  drafts.spec_method = SpecMethod::eagle;
  EngineConfig told = engine;  // its cache events are recorded, and judged
  told.hash_algorithm = HashAlgorithm::xxhash_cbor;
  EngineConfig told_of_states = align;
  told_of_states.engine = "vllm-0.33.0";
  told_of_states.hash_algorithm = HashAlgorithm::sha256_cbor;
  return {{"full", engine, {full(16)}, 80},
          {"events", told, {full(16), window(16, 40)}, 260},
          {"events_of_states", told_of_states, {full(16), states(16, MambaCacheMode::align)}, 120},
          {"full_and_window", engine, {full(16), window(16, 40)}, 260},
          {"states_align", align, {full(16), states(16, MambaCacheMode::align)}, 120},
          {"async", async, {full(16)}, 80},
          {"drafts", drafts, {full(16)}, 80}};
}

class RunRecorderTest : public testing::TestWithParam<Scenario> {};

TEST_P(RunRecorderTest, ARecordedRunConformsAndItsAuditIsClean) {
  const Scenario& scenario = GetParam();
  std::vector<KVCacheGroupSpec> groups;
  for (const KVCacheSpec& spec : scenario.specs) {
    groups.emplace_back();
    groups.back().layer_names = {"layers." + std::to_string(groups.size() - 1)};
    groups.back().spec = spec;
  }
  auto decisions = Scheduler::create(scenario.engine, groups, scenario.num_blocks);
  ASSERT_TRUE(decisions) << decisions.error().message;
  auto plan = plan_for_groups(groups, scenario.num_blocks);
  ASSERT_TRUE(plan) << plan.error().message;
  LockstepConfig config;
  config.engine = scenario.engine;
  config.backend = make_backend_config(scenario.engine, *plan);
  auto file = open_request_trace(std::string(LOCKSTEP_SOURCE_DIR) +
                                 "/traces/samples/shared_prefixes.jsonl");
  ASSERT_TRUE(file) << file.error().message;
  auto trace = read_all(**file);
  ASSERT_TRUE(trace) << trace.error().message;
  const std::string path = tests::temporary_path(scenario.name + ".jsonl");
  auto writer = RecordingWriter::create(
      path, recording_header(scenario.engine, groups, scenario.num_blocks, *decisions));
  ASSERT_TRUE(writer) << writer.error().message;
  TraceWorkloadOptions options;
  options.num_spec_tokens = scenario.engine.num_spec_tokens;
  const auto workload = make_trace_workload(std::move(*trace), options);
  std::int64_t num_preempted = 0;
  RunRecorder recorder(*workload, [&](const RecordedStep& step) {
    num_preempted += std::ssize(step.preempted);
    ASSERT_TRUE(writer->write(step));
  });
  const auto report = run_lockstep(config, {*decisions, recorder, {}, &recorder});
  ASSERT_TRUE(report) << report.error().message;
  ASSERT_TRUE(writer->close(recorder.end()));
  EXPECT_EQ(report->summary.verdict, Verdict::agreed);
  EXPECT_GT(report->summary.hits, 0);
  EXPECT_GT(num_preempted, 0) << "the pool is not tight enough for this test to mean much";

  const auto conformed = conform_recording(path);
  ASSERT_TRUE(conformed) << conformed.error().message;
  EXPECT_FALSE(conformed->mismatch)
      << conformed->mismatch->step << " " << conformed->mismatch->what << " recorded "
      << conformed->mismatch->recorded << " model " << conformed->mismatch->model;
  const auto audited = audit_recording(path);
  ASSERT_TRUE(audited) << audited.error().message;
  EXPECT_TRUE(audited->findings.empty()) << audited->findings[0].what;
}

INSTANTIATE_TEST_SUITE_P(Scenarios, RunRecorderTest, testing::ValuesIn(scenarios()),
                         [](const auto& scenario) { return scenario.param.name; });

}  // namespace
}  // namespace lockstep
