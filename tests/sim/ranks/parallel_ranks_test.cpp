// Ranks of tensor and pipeline parallelism: each has its own backend, plan and memory, and together
// they hold the whole model.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "tests/sim/ranks/simt_ranks.h"

namespace lockstep {
namespace {

struct ParallelSetting {
  const char* title;
  std::int32_t tp;
  std::int32_t pp;
  std::int32_t dcp;
  std::int64_t kv_heads;
  std::int32_t queries_per_kv;
};
void PrintTo(const ParallelSetting& setting, std::ostream* out) { *out << setting.title; }

LockstepConfig make_parallel(const ParallelSetting& setting, std::vector<KVCacheGroupSpec> groups) {
  LockstepConfig config = make_world(std::move(groups), 32);
  config.engine.dcp = setting.dcp;
  config.backend = make_backend_config(config.engine, config.backend.plan);
  config.backend.parallel.tp_size = setting.tp;
  config.backend.parallel.pp_size = setting.pp;
  config.backend.queries_per_kv = setting.queries_per_kv;
  if (setting.tp * setting.pp <= 4) config.backend.check = CheckMode::check;
  return config;
}

std::vector<KVCacheGroupSpec> attention_of(std::int64_t kv_heads, int layers) {
  KVCacheSpec spec = full_spec();
  spec.num_kv_heads = kv_heads;
  return {make_group("a", layers, spec)};
}

std::string what_ranks_say(const RunReport& run) {
  return run.summary.divergence ? to_text(*run.summary.divergence) : "stuck";
}

class ParallelRanks : public testing::TestWithParam<ParallelSetting> {};

TEST_P(ParallelRanks, EveryRankHoldsItsHeadsAndLayersAndAllHoldTheWhole) {
  const ParallelSetting& setting = GetParam();
  const LockstepConfig config = make_parallel(setting, attention_of(setting.kv_heads, 5));
  EXPECT_EQ(num_ranks(config.backend), setting.tp * setting.pp);
  const auto run = run_on_ranks(config, 14);
  ASSERT_TRUE(run) << run.error().message;
  EXPECT_EQ(run->summary.verdict, Verdict::agreed) << what_ranks_say(*run);
  EXPECT_GT(run->summary.hits, 0);
  EXPECT_GT(run->summary.outputs_checked, 0);
  EXPECT_GT(run->summary.union_rows_checked, 1000);
}

// A scale belongs to a layer of the whole model, on whichever rank its heads and it are.
TEST_P(ParallelRanks, RealNumbersOfAQuantisedCacheAreThoseOfTheWholeModel) {
  const ParallelSetting& setting = GetParam();
  for (const DType dtype : {DType::bf16, DType::int8}) {
    auto groups = attention_of(setting.kv_heads, 5);
    groups.front().spec.dtype = dtype;
    LockstepConfig config = make_parallel(setting, std::move(groups));
    config.backend.numbers = Numbers::real;
    const auto run = run_on_ranks(config, 14);
    ASSERT_TRUE(run) << run.error().message;
    EXPECT_EQ(run->summary.verdict, Verdict::agreed) << what_ranks_say(*run);
    EXPECT_GT(run->summary.outputs_checked, 1000);
    EXPECT_GT(run->summary.union_rows_checked, 1000);
  }
}

INSTANTIATE_TEST_SUITE_P(Settings, ParallelRanks,
                         testing::Values(ParallelSetting{"tp2", 2, 1, 1, 4, 1},
                                         ParallelSetting{"tp4_over_2_heads", 4, 1, 1, 2, 2},
                                         ParallelSetting{"tp8_over_2_heads_dcp2", 8, 1, 2, 2, 8},
                                         ParallelSetting{"pp2_of_5_layers", 1, 2, 1, 2, 1},
                                         ParallelSetting{"tp2_pp3", 2, 3, 1, 2, 1}),
                         [](const auto& setting) { return setting.param.title; });

TEST(ParallelRanksOfHybrids, StatesAreCutAndStagesShareOnePool) {
  KVCacheSpec attention = full_spec();
  attention.num_kv_heads = 4;
  KVCacheSpec states;
  states.kind = CacheKind::mamba;
  states.mamba_cache_mode = MambaCacheMode::align;
  states.block_size = attention.block_size;
  states.states = {{{3, 8}, DType::bf16}, {{4, 4, 4}, DType::fp32}};
  LockstepConfig config = make_parallel(
      {"", 2, 2, 1, 4, 1}, {make_group("attn", 2, attention), make_group("state", 3, states)});
  config.engine.mamba_cache_mode = MambaCacheMode::align;
  const auto run = run_on_ranks(config, 14);
  ASSERT_TRUE(run) << run.error().message;
  EXPECT_EQ(run->summary.verdict, Verdict::agreed) << what_ranks_say(*run);
}

// The state group is empty there: K and V of a block are separate, as without states.
TEST(ParallelRanksOfHybrids, AStageWithoutAStateLayerLaysOutAttentionAsIfThereWereNone) {
  KVCacheSpec states = mamba_spec(MambaCacheMode::none, 256);
  states.states = {{{4, 4}, DType::fp32}};
  LockstepConfig config = make_parallel(
      {"", 1, 2, 1, 2, 1}, {make_group("attn", 2, full_spec()), make_group("state", 1, states)});
  config.engine.enable_prefix_caching = false;
  const auto run = run_on_ranks(config, 14);
  ASSERT_TRUE(run) << run.error().message;
  EXPECT_EQ(run->summary.verdict, Verdict::agreed) << what_ranks_say(*run);
}

// FlashAttention with fp32 states takes 16, 32 or 64 tokens, wherever the model's states are.
TEST(ParallelRanksOfHybrids, AStageWithoutAStateLayerSplitsBlocksAsTheWholeModelDoes) {
  KVCacheSpec attention = full_spec();
  attention.block_size = 48;
  KVCacheSpec states = mamba_spec(MambaCacheMode::none, 256);
  states.states = {{{4, 4}, DType::fp32}};
  LockstepConfig config = make_parallel(
      {"", 1, 2, 1, 2, 1}, {make_group("attn", 2, attention), make_group("state", 1, states)});
  config.engine.enable_prefix_caching = false;
  ASSERT_EQ(config.backend.kernel_block_sizes, (std::vector<std::int64_t>{16, 256}));
  const auto run = run_on_ranks(config, 14);
  ASSERT_TRUE(run) << run.error().message;
  EXPECT_EQ(run->summary.verdict, Verdict::agreed) << what_ranks_say(*run);
}

TEST(ParallelRanksOfHybrids, LatentRowsAndHiddenStatesAreWholeOnEveryRank) {
  KVCacheSpec latent = full_spec();
  latent.kind = CacheKind::mla;
  latent.num_kv_heads = 1;
  KVCacheSpec hidden = full_spec();
  hidden.kind = CacheKind::hidden_state;
  hidden.num_kv_heads = 2;
  const LockstepConfig config = make_parallel(
      {"", 4, 1, 1, 1, 8}, {make_group("mla", 2, latent), make_group("hidden", 1, hidden)});
  const auto run = run_on_ranks(config, 14);
  ASSERT_TRUE(run) << run.error().message;
  EXPECT_EQ(run->summary.verdict, Verdict::agreed) << what_ranks_say(*run);
  EXPECT_GT(run->summary.rows_extracted, 0);
}

// Stages hold different layers, so what they leave out adds up.
TEST(ParallelRanksReport, SumsWhatTheBudgetsOfAllStagesLeaveOut) {
  LockstepConfig config = make_parallel({"", 2, 2, 1, 4, 1}, attention_of(4, 4));
  config.budget = {.probe_rows = 200, .query_rows = 50, .untouched_pages = 2};
  const auto run = run_on_ranks(config, 14);
  ASSERT_TRUE(run) << run.error().message;
  EXPECT_EQ(run->summary.verdict, Verdict::agreed) << what_ranks_say(*run);
  std::vector<std::string> budgets;
  for (const std::string& line : run->summary.not_checked)
    if (line.find("the budget is") != std::string::npos) budgets.push_back(line);
  ASSERT_GE(budgets.size(), 1u);
  // Both tensor parallel ranks of a stage read the same rows.
  EXPECT_EQ(
      budgets[0].find(fmt::format("attention digests read {} of ", run->summary.rows_read / 2)), 0u)
      << budgets[0];
  for (const std::string& line : budgets)
    EXPECT_TRUE(line.ends_with("per step and pipeline stage")) << line;
}

TEST(ParallelRanksDivergence, ARankThatTakesItselfForAnotherIsNamedWithItsPlace) {
  const LockstepConfig config = make_parallel({"", 2, 2, 1, 4, 1}, attention_of(4, 4));
  const auto run = run_on_ranks(config, 14, {0, 1, 2, 2});
  ASSERT_TRUE(run) << run.error().message;
  ASSERT_EQ(run->summary.verdict, Verdict::divergence);
  EXPECT_EQ(run->summary.divergence->phase, Phase::page_written);
  EXPECT_EQ(run->summary.divergence->rank, 3);
  EXPECT_EQ(run->summary.divergence->tp_rank, 1);
  EXPECT_EQ(run->summary.divergence->pp_rank, 1);
  EXPECT_NE(what_ranks_say(*run).find("rank 3 (tp 1, pp 1)"), std::string::npos)
      << what_ranks_say(*run);
}

struct Refusal {
  const char* title;
  ParallelSetting setting;
  const char* says;
};

TEST(ParallelRanksRefused, DegreesThatNothingCanBeCutIntoSayWhy) {
  for (const auto& [title, setting, says] :
       {Refusal{"heads", {"", 3, 1, 1, 4, 3}, "4 KV heads can neither be cut"},
        Refusal{"queries", {"", 4, 1, 1, 2, 1}, "2 query heads (1 per KV head)"},
        Refusal{"stages", {"", 1, 7, 1, 4, 1}, "the model has 5 layers"},
        Refusal{"dcp and heads", {"", 4, 1, 2, 4, 1}, "hold the same KV heads"},
        Refusal{"dcp of tp", {"", 3, 1, 2, 3, 1}, "must divide it"}}) {
    const LockstepConfig config = make_parallel(setting, attention_of(setting.kv_heads, 5));
    const auto sound = check_ranks(config.backend);
    ASSERT_FALSE(sound) << title;
    EXPECT_NE(sound.error().message.find(says), std::string::npos) << sound.error().message;
  }
}

}  // namespace
}  // namespace lockstep
