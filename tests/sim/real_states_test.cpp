// States of real numbers, model against kernels: whatever splits a request's tokens (chunks,
// rejected drafts, preemption, prefix hits on states), each update leaves what doubles compute, and
// every copy and untouched page is the same bit for bit.
#include <fmt/core.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "cuda_backend/backends.h"
#include "sim/verdict/run_summary.h"
#include "tests/sim/ranks/simt_ranks.h"
#include "tests/sim/world.h"

namespace lockstep {
namespace {

using testing::Contains, testing::HasSubstr;

struct Setting {
  const char* title;
  MambaCacheMode mode = MambaCacheMode::align;
  std::int32_t num_drafts = 0;
  DType dtype = DType::fp32;  // of the recurrent state
  std::int64_t num_blocks = 30;
};
void PrintTo(const Setting& setting, std::ostream* out) { *out << setting.title; }

// Layers 1 and 2 of the plan: a gated delta rule and a selective update, each with a convolution.
LockstepConfig make_states(const Setting& setting) {
  const std::int64_t block_size = setting.mode == MambaCacheMode::none ? 256 : 16;
  KVCacheSpec states = mamba_spec(setting.mode, block_size);
  states.states = {{{3 + setting.num_drafts, 8}, DType::bf16}, {{2, 4, 6}, setting.dtype}};
  states.num_speculative_blocks = setting.num_drafts;
  LockstepConfig config =
      make_world({make_group("a", 1, full_spec()), make_group("m", 2, states)}, setting.num_blocks);
  // The later release keeps states for every block in no mode but align.
  if (setting.mode == MambaCacheMode::all) config.engine.engine = "vllm-0.22.1";
  if (setting.num_drafts > 0) {
    config.engine.num_spec_tokens = setting.num_drafts;
    config.engine.spec_method = SpecMethod::eagle;
  }
  config.backend =
      make_backend_config(config.engine, config.backend.plan, AttentionBackend::flash_attn);
  config.backend.numbers = Numbers::real;
  return config;
}

RunSummary run_states(const LockstepConfig& config, int num_requests = 24) {
  auto backend = make_simt_backend(config.backend);
  if (!backend) ADD_FAILURE() << backend.error().message;
  const auto run = run_world(config, make_traffic(3, num_requests), backend->get());
  if (!run) ADD_FAILURE() << run.error().message;
  return run->summary;
}
void expect_states_agree(const RunSummary& run) {
  EXPECT_EQ(run.verdict, Verdict::agreed) << (run.divergence ? to_text(*run.divergence) : "stuck");
  EXPECT_GT(run.state_numbers_checked, 5'000);
  EXPECT_GT(run.state_outputs_checked, 1'000);
}

class RealStates : public testing::TestWithParam<Setting> {};

TEST_P(RealStates, FollowDoublesInEveryStep) {
  expect_states_agree(run_states(make_states(GetParam())));
}

TEST_P(RealStates, AreTheSameWithEveryAccessWatchedOverLateStreamsAndFromGraphs) {
  LockstepConfig config = make_states(GetParam());
  const RunSummary plain = run_states(config, 7);
  config.backend.check = CheckMode::check;
  const RunSummary watched = run_states(config, 7);
  expect_states_agree(watched);
  EXPECT_EQ(watched.state_hash, plain.state_hash);
  config.backend.num_streams = 3;
  config.backend.delay_streams = true;
  const RunSummary late = run_states(config, 7);
  expect_states_agree(late);
  EXPECT_EQ(late.state_hash, plain.state_hash);
  config.backend.max_cudagraph_capture_size = 32;
  const RunSummary captured = run_states(config, 7);
  expect_states_agree(captured);
  EXPECT_GT(captured.graphs.replayed, 0);
}

INSTANTIATE_TEST_SUITE_P(
    Settings, RealStates,
    testing::Values(Setting{"none", MambaCacheMode::none, 0, DType::fp32, 22}, Setting{"align"},
                    Setting{"align_bf16", MambaCacheMode::align, 0, DType::bf16},
                    Setting{"align_tight", MambaCacheMode::align, 0, DType::fp16, 20},
                    Setting{"all", MambaCacheMode::all, 0, DType::fp32, 44},
                    Setting{"none_with_drafts", MambaCacheMode::none, 2, DType::bf16, 30},
                    Setting{"align_with_drafts", MambaCacheMode::align, 3, DType::fp32, 44},
                    Setting{"align_with_drafts_bf16", MambaCacheMode::align, 2, DType::bf16, 34}),
    [](const auto& setting) { return setting.param.title; });

TEST(RealStatesOfTraffic, SeesHitsAndPreemption) {
  const RunSummary roomy = run_states(make_states({"", MambaCacheMode::align, 0, DType::fp32, 60}));
  EXPECT_GT(roomy.hits, 3);
  const RunSummary tight = run_states(make_states({"", MambaCacheMode::align, 0, DType::fp32, 16}));
  EXPECT_GT(tight.preemptions, 3);
}

TEST(RealStatesOfTraffic, AreCountedInTheResult) {
  const RunSummary run = run_states(make_states({"", MambaCacheMode::align}), 7);
  const auto json = json_of(run);
  for (const auto& [field, count] :
       {std::pair{"state_numbers_checked", run.state_numbers_checked},
        std::pair{"state_outputs_checked", run.state_outputs_checked}}) {
    EXPECT_GT(count, 0);
    EXPECT_EQ(json.at(field), count);
  }
  EXPECT_THAT(run.not_checked, Contains(HasSubstr("outputs of states are those of ")));
}

TEST(RealStatesOfRanks, AreCutByTensorParallelismAndDealtToStages) {
  LockstepConfig config = make_states({"", MambaCacheMode::align});
  config.backend.parallel.tp_size = 2;
  config.backend.parallel.pp_size = 2;
  const auto run = run_on_ranks(config, 14);
  ASSERT_TRUE(run) << run.error().message;
  expect_states_agree(run->summary);
}

struct Planted {
  const char* mutant;
  Setting setting;
  Phase phase;
};

TEST(RealStatesDivergence, WhatOnlyRealNumbersShowIsNamedWithRequestAndElement) {
  for (const auto& [mutant, setting, phase] :
       {Planted{"conv-offset-ignored",
                {"", MambaCacheMode::align, 3, DType::fp32, 44},
                Phase::page_written},
        Planted{"state-targets-last",
                {"", MambaCacheMode::none, 2, DType::fp32, 30},
                Phase::page_written},
        Planted{"chunk-carry-undecayed", {"", MambaCacheMode::align}, Phase::page_written},
        Planted{"state-copy-lost", {"", MambaCacheMode::align}, Phase::state_output}}) {
    LockstepConfig config = make_states(setting);
    config.backend.mutant = mutant;
    const RunSummary run = run_states(config);
    ASSERT_EQ(run.verdict, Verdict::divergence) << mutant;
    EXPECT_EQ(run.divergence->phase, phase) << mutant << to_text(*run.divergence);
    EXPECT_NE(run.divergence->message.find("state"), std::string::npos) << mutant;
    EXPECT_FALSE(run.divergence->request.empty()) << mutant;
  }
}

TEST(RealStatesRefused, StatesThatAreNoNumbersOrTooWideSaySo) {
  for (const StateTensorSpec& state :
       {StateTensorSpec{{2, 4, 4}, DType::int8}, StateTensorSpec{{2, 2, 300}, DType::fp32}}) {
    LockstepConfig config = make_states({"", MambaCacheMode::align});
    auto groups = config.backend.plan.groups;
    groups[1].spec.states[1] = state;
    for (KVCacheGroupSpec& group : groups) group.spec.page_size_padded.reset();
    config.backend.plan = *plan_for_groups(std::move(groups), 30);
    const auto backend = make_simt_backend(config.backend);
    ASSERT_FALSE(backend);
    EXPECT_NE(backend.error().message.find("numbers: state 1"), std::string::npos)
        << backend.error().message;
  }
}

}  // namespace
}  // namespace lockstep
