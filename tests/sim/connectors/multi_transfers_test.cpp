// Several connectors in a complete engine: each loads and stores, their host blocks are separate,
// and every byte is the model's.
#include "sim/connectors/multi_connector.h"

#include <gtest/gtest.h>

#include "cuda_backend/backends.h"
#include "sim/connectors/connect.h"
#include "tests/sim/world.h"

namespace lockstep {
namespace {

using Parts = std::vector<ConnectorKind>;

LockstepConfig world_beside(Parts parts, const std::vector<KVCacheGroupSpec>& groups) {
  // Blocks of one group leave a tight pool soon, and come back from the tier.
  LockstepConfig config = make_world(groups, groups.size() == 1 ? 20 : 40);
  config.engine.engine = "vllm-0.22.1";
  config.connector.parts = std::move(parts);
  config.connector.num_host_blocks = 24;
  config.backend.num_host_blocks =
      num_host_blocks(config.connector, config.engine, config.backend.plan);
  return config;
}

RunSummary run_beside(LockstepConfig config, std::uint64_t seed, Backend* backend) {
  config.backend.seed = seed;
  SessionParts parts;
  parts.clients = make_trace_workload(make_traffic(seed, 40), {.step_time = {}, .seed = 7});
  parts.connector_seed = seed;
  if (backend != nullptr) parts.borrowed = {backend};
  auto report = run_session(config, std::move(parts));
  EXPECT_TRUE(report) << report.error().message;
  return report ? report->summary : RunSummary{};
}

RunSummary run_plain(const LockstepConfig& config, std::uint64_t seed) {
  PlainBackend backend(config.backend);
  RunSummary summary = run_beside(config, seed, &backend);
  if (summary.divergence) ADD_FAILURE() << to_text(*summary.divergence);
  return summary;
}

const auto kPeers = ConnectorKind::peers;
const auto kHost = ConnectorKind::host;

}  // namespace

TEST(MultiTransfers, EveryPartLoadsAndStoresAndEveryByteIsRight) {
  for (const Parts& parts :
       {Parts{kPeers, kHost}, Parts{kHost, kPeers}, Parts{kHost, kPeers, kHost}}) {
    RunSummary sum;
    std::int64_t loaded_alone = 0;
    for (std::uint64_t seed = 0; seed < 4; ++seed) {
      const auto groups = {make_group("a", 2, full_spec())};
      const RunSummary run = run_plain(world_beside(parts, groups), seed);
      sum.blocks_loaded += run.blocks_loaded;
      sum.host_evictions += run.host_evictions;
      sum.frees_delayed += run.frees_delayed;
      sum.blocks_lost += run.blocks_lost;
      loaded_alone += run_plain(world_beside({parts.front()}, groups), seed).blocks_loaded;
    }
    EXPECT_GT(sum.blocks_loaded, loaded_alone) << connector_parts_text(parts);
    EXPECT_GT(sum.host_evictions, 0) << connector_parts_text(parts);
    EXPECT_GT(sum.frees_delayed, 10) << connector_parts_text(parts);
    EXPECT_GT(sum.blocks_lost, 0) << connector_parts_text(parts);
  }
}

TEST(MultiTransfers, OnKernelsTheRunIsThatOfPlainLoops) {
  LockstepConfig config = world_beside(
      {kPeers, kHost}, {make_group("a", 2, full_spec()), make_group("w", 1, sliding_spec(40))});
  config.backend.num_streams = 2;
  const auto simt = make_simt_backend(config.backend);
  ASSERT_TRUE(simt) << simt.error().message;
  const RunSummary on_kernels = run_beside(config, 1, simt->get());
  const RunSummary plain = run_plain(config, 1);
  EXPECT_FALSE(on_kernels.divergence) << to_text(*on_kernels.divergence);
  EXPECT_GT(on_kernels.blocks_loaded, 0);
  EXPECT_EQ(on_kernels.state_hash, plain.state_hash);
  EXPECT_EQ(on_kernels.host_bytes_checked, plain.host_bytes_checked);
}

TEST(MultiTransfers, APartThatIsGivenMoreGroupsThanItTakesIsFoundByTheMemoryModel) {
  const auto one_group = ConnectorKind::one_group_peers;
  LockstepConfig config = world_beside(
      {one_group, kHost}, {make_group("a", 2, full_spec()), make_group("w", 1, sliding_spec(40))});
  EXPECT_FALSE(check_setup(config));
  config.connector.setup_defect = MultiConnectorDefect::hma_any;
  ASSERT_TRUE(check_setup(config));
  PlainBackend backend(config.backend);
  const RunSummary run = run_beside(config, 1, &backend);
  ASSERT_TRUE(run.divergence);
  EXPECT_TRUE(run.divergence->phase == Phase::decide || run.divergence->phase == Phase::transfer)
      << to_text(*run.divergence);
}

}  // namespace lockstep
