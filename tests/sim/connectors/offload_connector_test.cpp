// A host tier in a complete engine: what is stored is found again, every moved block is the
// request's own, and every byte of the cache and of the tier is the model's.
#include "sim/connectors/offload_connector.h"

#include <gtest/gtest.h>

#include "cuda_backend/backends.h"
#include "tests/sim/world.h"

namespace lockstep {
namespace {

LockstepConfig tier_world(std::vector<KVCacheGroupSpec> groups, std::int64_t num_blocks,
                          std::int64_t num_host_blocks) {
  LockstepConfig config = make_world(std::move(groups), num_blocks);
  config.engine.engine = "vllm-0.22.1";
  config.connector.parts = {ConnectorKind::host};
  config.connector.num_host_blocks = num_host_blocks;
  config.backend.num_host_blocks = num_host_blocks;
  return config;
}

Result<RunReport> run_connected(const LockstepConfig& config, const Trace& trace,
                                Backend* backend) {
  SessionParts parts;
  parts.clients = make_trace_workload(trace, {.step_time = {}, .seed = 7});
  parts.connector_seed = config.backend.seed;
  if (backend != nullptr) parts.borrowed = {backend};
  return run_session(config, std::move(parts));
}

RunSummary run_plainly(const LockstepConfig& config, std::uint64_t seed) {
  PlainBackend backend(config.backend);
  auto report = run_connected(config, make_traffic(seed, 40), &backend);
  EXPECT_TRUE(report) << report.error().message;
  if (!report) return {};
  if (report->summary.divergence) ADD_FAILURE() << to_text(*report->summary.divergence);
  return report->summary;
}

}  // namespace

TEST(OffloadConnector, BlocksComeBackFromTheTierAndEveryByteIsRight) {
  RunSummary sum;
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    LockstepConfig config = tier_world({make_group("a", 2, full_spec())}, 20, 24);
    config.backend.seed = seed;
    const RunSummary run = run_plainly(config, seed);
    sum.blocks_loaded += run.blocks_loaded;
    sum.blocks_stored += run.blocks_stored;
    sum.host_evictions += run.host_evictions;
    sum.frees_delayed += run.frees_delayed;
    sum.host_blocks_checked += run.host_blocks_checked;
    EXPECT_EQ(run.blocks_lost, 0);
  }
  EXPECT_GT(sum.blocks_loaded, 20);
  EXPECT_GT(sum.blocks_stored, 100);
  EXPECT_GT(sum.host_evictions, 20);
  EXPECT_GT(sum.frees_delayed, 10);
  EXPECT_GT(sum.host_blocks_checked, sum.blocks_stored);
}

TEST(OffloadConnector, SeveralGroupsLoadWhatEachOfThemStillReads) {
  std::int64_t loaded = 0;
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    LockstepConfig config =
        tier_world({make_group("a", 2, full_spec()), make_group("w", 1, sliding_spec(40))}, 40, 48);
    config.backend.seed = seed;
    loaded += run_plainly(config, seed).blocks_loaded;
  }
  EXPECT_GT(loaded, 10);
}

TEST(OffloadConnector, FailedLoadsAreComputedAgainOrEndTheirRequests) {
  for (const auto policy : {KVLoadFailurePolicy::recompute, KVLoadFailurePolicy::fail}) {
    std::int64_t lost = 0;
    for (std::uint64_t seed = 0; seed < 4; ++seed) {
      LockstepConfig config = tier_world({make_group("a", 1, full_spec())}, 24, 48);
      config.connector.load_failed_percent = 40;
      config.connector.load_failure_policy = policy;
      config.backend.seed = seed;
      lost += run_plainly(config, seed).blocks_lost;
    }
    EXPECT_GT(lost, 5);
  }
}

TEST(OffloadConnector, OnKernelsOverStreamsTheRunIsThatOfPlainLoops) {
  LockstepConfig config = tier_world({make_group("a", 2, full_spec())}, 20, 24);
  const RunSummary plain = run_plainly(config, 1);
  config.backend.num_streams = 3;
  config.backend.delay_streams = true;
  config.backend.check = CheckMode::check;
  auto backend = make_simt_backend(config.backend);
  ASSERT_TRUE(backend) << backend.error().message;
  const auto report = run_connected(config, make_traffic(1, 40), backend->get());
  ASSERT_TRUE(report) << report.error().message;
  if (report->summary.divergence) ADD_FAILURE() << to_text(*report->summary.divergence);
  EXPECT_EQ(report->summary.state_hash, plain.state_hash);
  EXPECT_EQ(report->summary.blocks_loaded, plain.blocks_loaded);
}

TEST(OffloadConnector, WithoutABackendItDecidesTheSame) {
  const LockstepConfig config = tier_world({make_group("a", 2, full_spec())}, 20, 24);
  const auto alone = run_connected(config, make_traffic(2, 40), nullptr);
  ASSERT_TRUE(alone) << alone.error().message;
  const RunSummary compared = run_plainly(config, 2);
  EXPECT_EQ(alone->summary.steps, compared.steps);
  EXPECT_EQ(alone->summary.blocks_loaded, compared.blocks_loaded);
  EXPECT_EQ(alone->summary.blocks_stored, compared.blocks_stored);
  EXPECT_EQ(alone->summary.request_steps, compared.request_steps);
}

TEST(OffloadConnector, ItsPlantedDefectsAreFound) {
  for (const ConnectorDefect defect :
       {ConnectorDefect::transfer_failed_marked_ok, ConnectorDefect::free_send_in_flight}) {
    int found = 0;
    for (std::uint64_t seed = 0; seed < 4; ++seed) {
      LockstepConfig config = tier_world({make_group("a", 1, full_spec())}, 16, 48);
      config.connector.defect = defect;
      config.connector.load_failed_percent =
          defect == ConnectorDefect::transfer_failed_marked_ok ? 50 : 0;
      config.connector.delay_steps_max = 12;
      config.backend.seed = seed;
      PlainBackend backend(config.backend);
      const auto report = run_connected(config, make_traffic(seed, 40), &backend);
      ASSERT_TRUE(report) << report.error().message;
      found += report->summary.verdict == Verdict::divergence ? 1 : 0;
    }
    EXPECT_GT(found, 0) << name_of(defect);
  }
}

TEST(HostBlockPool, TheLeastRecentlyUsedBlockGoesFirstAndNeverOneInUse) {
  HostBlockPool pool(2);
  const auto key = [](std::uint64_t low) { return HostKey{.high = 0, .low = low, .group = 0}; };
  const auto first = pool.take(key(1));
  const auto second = pool.take(key(2));
  ASSERT_TRUE(first && second);
  EXPECT_FALSE(pool.take(key(3))) << "neither is stored yet";
  pool.set_ready(*first);
  pool.set_ready(*second);
  pool.use(key(1));
  pool.pin(*second);
  EXPECT_EQ(pool.take(key(3)), first) << "the other one is being loaded";
  EXPECT_FALSE(pool.contains(key(1)));
  pool.unpin(*second);
  pool.drop(*first);
  EXPECT_EQ(pool.take(key(4)), first);
  EXPECT_EQ(pool.take(key(5)), second);
  EXPECT_EQ(pool.num_evicted(), 2);
}

}  // namespace lockstep
