// Ranks of context parallelism: each has its own backend and memory, all follow the same decisions,
// and together they hold every token once.
#include <gtest/gtest.h>

#include "tests/sim/ranks/simt_ranks.h"

namespace lockstep {
namespace {

struct Setting {
  const char* title;
  CacheKind kind;
  std::int32_t dcp;
  std::int32_t pcp;
  std::int32_t interleave;
  AttentionBackend attention;
};
void PrintTo(const Setting& setting, std::ostream* out) { *out << setting.title; }

class ContextParallel : public testing::TestWithParam<Setting> {};

LockstepConfig make_ranks(const Setting& setting) {
  KVCacheSpec spec = full_spec();
  spec.kind = setting.kind;
  if (setting.kind == CacheKind::mla) spec.num_kv_heads = 1;
  LockstepConfig config = make_world({make_group("a", 2, spec)}, 20);
  config.engine.engine = "vllm-0.22.1";
  config.engine.dcp = setting.dcp;
  config.engine.pcp = setting.pcp;
  config.backend = make_backend_config(config.engine, config.backend.plan, setting.attention);
  config.backend.context.interleave = setting.interleave;
  config.backend.check = CheckMode::check;
  return config;
}

TEST_P(ContextParallel, EveryRankHoldsItsOwnTokensAndNoOthers) {
  const LockstepConfig config = make_ranks(GetParam());
  std::vector<std::int32_t> ranks;
  for (std::int32_t r = 0; r < config.backend.context.num_ranks; ++r) ranks.push_back(r);
  ASSERT_EQ(std::ssize(ranks), GetParam().dcp * GetParam().pcp);
  const auto run = run_on_ranks(config, 30, ranks);
  ASSERT_TRUE(run) << run.error().message;
  EXPECT_EQ(run->summary.verdict, Verdict::agreed)
      << (run->summary.divergence ? to_text(*run->summary.divergence) : "stuck");
  EXPECT_GT(run->summary.hits, 0);
  EXPECT_GT(run->summary.outputs_checked, 0);
  EXPECT_GT(run->summary.pages_checked, 1000);
}

// Each rank attends to its own tokens; their answers are not combined.
TEST_P(ContextParallel, AttentionOfRealNumbersIsOverARanksOwnTokens) {
  LockstepConfig config = make_ranks(GetParam());
  config.backend.numbers = Numbers::real;
  const auto run = run_on_ranks(config, 30);
  ASSERT_TRUE(run) << run.error().message;
  EXPECT_EQ(run->summary.verdict, Verdict::agreed)
      << (run->summary.divergence ? to_text(*run->summary.divergence) : "stuck");
  EXPECT_GT(run->summary.outputs_checked, 1000);
}

INSTANTIATE_TEST_SUITE_P(
    Settings, ContextParallel,
    testing::Values(
        Setting{"dcp2", CacheKind::full_attention, 2, 1, 1, AttentionBackend::flash_attn},
        Setting{"dcp2_runs_of_4", CacheKind::full_attention, 2, 1, 4, AttentionBackend::flashinfer},
        Setting{"dcp2_pcp2_runs_of_16", CacheKind::full_attention, 2, 2, 16,
                AttentionBackend::triton_attn},
        Setting{"mla_dcp4", CacheKind::mla, 4, 1, 1, AttentionBackend::triton_mla},
        Setting{"pcp3", CacheKind::full_attention, 1, 3, 2, AttentionBackend::any_size}),
    [](const auto& setting) { return setting.param.title; });

TEST(ContextParallelRanks, ARankThatTakesItselfForAnotherDivergesAndIsNamed) {
  const LockstepConfig config =
      make_ranks({"", CacheKind::full_attention, 2, 1, 1, AttentionBackend::flash_attn});
  const auto run = run_on_ranks(config, 30, {0, 0});
  ASSERT_TRUE(run) << run.error().message;
  ASSERT_EQ(run->summary.verdict, Verdict::divergence);
  EXPECT_EQ(run->summary.divergence->rank, 1);
  EXPECT_EQ(run->summary.divergence->phase, Phase::slot_mapping);
  EXPECT_NE(to_text(*run->summary.divergence).find("rank 1"), std::string::npos);
}

// In addition to a sharded cache: rows, windows and a ring that are replicated, and an indexer's
// rows for four tokens each.
LockstepConfig with_whole_caches(std::int32_t dcp, std::int32_t interleave) {
  KVCacheSpec whole = full_spec(), window = sliding_spec(40), latent = full_spec();
  latent.kind = CacheKind::mla;
  latent.num_kv_heads = 1;
  KVCacheSpec indexer = latent, ring = latent;
  indexer.tokens_per_state = {4};
  ring.kind = CacheKind::circular_buffer;
  ring.keys_alone = true;
  for (KVCacheSpec* spec : {&whole, &window, &ring}) spec->dcp_sharded = false;
  LockstepConfig config = make_world(
      {make_group("a", 2, full_spec()), make_group("b", 2, whole), make_group("c", 1, window),
       make_group("d", 1, latent), make_group("e", 1, indexer), make_group("f", 1, ring)},
      60);
  config.engine.engine = "vllm-0.33.0";
  config.engine.dcp = dcp;
  config.backend = make_backend_config(config.engine, config.backend.plan);
  config.backend.context.interleave = interleave;
  config.backend.check = CheckMode::check;
  return config;
}

TEST(ContextParallelRanks, CachesThatEveryRankKeepsWholeLieBesideThoseThatAreDealtOut) {
  for (const auto& [dcp, interleave] : {std::pair{2, 4}, {3, 8}, {4, 16}}) {
    const auto run = run_on_ranks(with_whole_caches(dcp, interleave), 30);
    ASSERT_TRUE(run) << run.error().message;
    EXPECT_EQ(run->summary.verdict, Verdict::agreed)
        << (run->summary.divergence ? to_text(*run->summary.divergence) : "stuck");
    EXPECT_GT(run->summary.hits, 0);
    EXPECT_GT(run->summary.outputs_checked, 0);
    EXPECT_GT(run->summary.union_rows_checked, 1000);
  }
}

TEST(ContextParallelRanks, RowsOfSeveralTokensLieOnOneRankOrAreRefused) {
  const auto run = run_on_ranks(with_whole_caches(2, 2), 30);
  ASSERT_FALSE(run);
  EXPECT_NE(run.error().message.find("an entry of 4 tokens is on one rank"), std::string::npos)
      << run.error().message;
}

TEST(ContextParallelRanks, KindsThatAreNotDealtOutAreRefused) {
  LockstepConfig config = make_world({make_group("a", 1, sliding_spec(40))}, 20);
  config.engine.dcp = 2;
  config.backend = make_backend_config(config.engine, config.backend.plan);
  const auto run = run_on_ranks(config, 30, {0, 1});
  ASSERT_FALSE(run);
  EXPECT_NE(run.error().message.find("context parallelism"), std::string::npos)
      << run.error().message;
}

}  // namespace
}  // namespace lockstep
