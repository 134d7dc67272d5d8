// Random requests with a simulated KV connector, in pools that are too small for them: every run
// ends with all blocks free or in a cycle, and a search of seeds finds both deadlocks of
// docs/findings.md again. Where failed loads end their requests the audit finds nothing else; where
// they are recomputed it finds the lost blocks of finding 9, and nothing else.
#include <gtest/gtest.h>

#include "properties/audit/auditor.h"
#include "reference/types/token_rows.h"
#include "sim/connectors/connect.h"
#include "sim/recording/run_recorder.h"
#include "sim/session/session.h"
#include "tests/support/scripted_workload.h"

namespace lockstep {
namespace {

constexpr std::int32_t kTokensOfABlock = 4;
constexpr std::int64_t kNumBlocks = 10;

struct SearchOutcome {
  RunSummary summary;
  std::vector<AuditFinding> findings;
  std::int64_t free_blocks = 0;
  std::string end;
};

// Ten requests of up to 28 tokens, each of which fits into the pool alone.
std::vector<ScriptedWorkload::Turnful> random_script(std::uint64_t seed) {
  std::uint64_t num_drawn = 0;
  const auto below = [&](std::uint64_t bound) {
    return splitmix64(seed * 1'000'003 + num_drawn++) % bound;
  };
  std::vector<ScriptedWorkload::Turnful> script(12);
  for (int i = 0; i < 10; ++i) {
    const std::string name = "r" + std::to_string(i);
    const std::size_t step = below(10);
    const auto size = static_cast<std::uint32_t>(1 + below(28));
    script[step].push_back(ScriptedWorkload::add(name, seeded_prompt(below(3), size),
                                                 static_cast<std::int32_t>(1 + below(6))));
    if (below(8) == 0) script[step + 1 + below(2)].push_back(ScriptedWorkload::abort(name));
  }
  return script;
}

EngineConfig engine_config() {
  EngineConfig engine;
  engine.engine = "vllm-0.22.1";
  engine.max_num_seqs = 4;
  engine.max_num_batched_tokens = 16;
  engine.max_model_len = 36;
  engine.block_size = kTokensOfABlock;
  return engine;
}

void run(std::uint64_t seed, KVLoadFailurePolicy policy, SearchOutcome& outcome) {
  SimulatedConnectorOptions options;
  options.seed = seed;
  options.block_size = kTokensOfABlock;
  const auto workload =
      connect_peers(std::make_unique<ScriptedWorkload>(random_script(seed)), options);
  KVCacheGroupSpec group;
  group.layer_names = {"layers.0"};
  group.spec.block_size = kTokensOfABlock;
  group.spec.head_size = 8;
  std::unique_ptr<Auditor> auditor;
  RunRecorder recorder(*workload, [&](const RecordedStep& step) { auditor->step(step); });
  auto decisions =
      Scheduler::create(engine_config(), {group}, kNumBlocks, {recorder.connector(), policy});
  ASSERT_TRUE(decisions) << decisions.error().message;
  RecordingHeader header = recording_header(engine_config(), {group}, kNumBlocks, *decisions);
  header.connector.emplace();
  auditor = std::make_unique<Auditor>(header);
  LockstepConfig config;
  config.engine = engine_config();
  config.backend.plan.num_blocks = kNumBlocks;
  config.backend.plan.groups = {group};
  const auto report = run_lockstep(config, {*decisions, recorder, {}, &recorder});
  ASSERT_TRUE(report) << report.error().message;
  auditor->end(recorder.end());
  outcome = {report->summary, auditor->take_findings(), decisions->num_free_blocks(), {}};
  for (const HeldRequest& held : decisions->held())
    outcome.end += std::string(decisions->name(held.id)) + " ";
}

TEST(ConnectorSearch, EveryRunEndsWithFreeBlocksOrInACircleAndTheFindingsAreFoundAgain) {
  std::int64_t num_behind_large = 0;
  std::int64_t num_half_loaded = 0;
  std::int64_t num_lost_blocks = 0;
  for (std::uint64_t seed = 0; seed < 400; ++seed) {
    SCOPED_TRACE(seed);
    const auto policy = seed % 2 == 0 ? KVLoadFailurePolicy::recompute : KVLoadFailurePolicy::fail;
    SearchOutcome outcome;
    ASSERT_NO_FATAL_FAILURE(run(seed, policy, outcome));
    std::erase_if(outcome.findings, [](const AuditFinding& finding) {
      return finding.what.starts_with("nothing runs again");
    });
    for (const AuditFinding& finding : outcome.findings) {
      ++num_lost_blocks;
      ASSERT_TRUE(policy == KVLoadFailurePolicy::recompute &&
                  finding.what.find("holds nothing that was written") != std::string::npos)
          << "step " << finding.step << ", " << finding.request << ": " << finding.what;
    }
    if (outcome.summary.verdict == Verdict::agreed) {
      // Requests that are still being sent when the last request ends keep their blocks.
      if (outcome.end.empty()) {
        EXPECT_EQ(outcome.free_blocks, kNumBlocks - 1);
      }
      continue;
    }
    ASSERT_FALSE(outcome.summary.wait_cycle.empty()) << outcome.summary.stuck[0].why;
    const bool holds_something =
        outcome.summary.wait_cycle.find(" (") < outcome.summary.wait_cycle.find(" waits for");
    ++(holds_something ? num_half_loaded : num_behind_large);
  }
  EXPECT_GT(num_behind_large, 0);
  EXPECT_GT(num_half_loaded, 0);
  EXPECT_GT(num_lost_blocks, 0);
  RecordProperty("behind_large", static_cast<int>(num_behind_large));
  RecordProperty("half_loaded", static_cast<int>(num_half_loaded));
  RecordProperty("lost_blocks", static_cast<int>(num_lost_blocks));
}

TEST(ConnectorSearch, TheSameSeedGivesTheSameRun) {
  SearchOutcome first;
  SearchOutcome second;
  ASSERT_NO_FATAL_FAILURE(run(11, KVLoadFailurePolicy::recompute, first));
  ASSERT_NO_FATAL_FAILURE(run(11, KVLoadFailurePolicy::recompute, second));
  EXPECT_EQ(first.summary.state_hash, second.summary.state_hash);
  EXPECT_EQ(first.summary.steps, second.summary.steps);
}

}  // namespace
}  // namespace lockstep
