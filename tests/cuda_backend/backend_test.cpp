// The whole backend against a toy engine: after every step, tables, slots, digests and outputs;
// after every third step, every byte of the pool.
#include <gtest/gtest.h>

#include <algorithm>

#include "cuda_backend/backends.h"
#include "tests/cuda_backend/toy_engine.h"

namespace lockstep {
namespace {

constexpr int kSteps = 24;

class BackendTest : public ::testing::TestWithParam<ToyPlan> {};

TEST_P(BackendTest, AgreesWithTheToyEngineInEveryMode) {
  for (CheckMode mode : {CheckMode::fast, CheckMode::check, CheckMode::hunt}) {
    ToyPlan plan = GetParam();
    plan.config.check = mode;
    for (const std::string& line : toy_differences(plan, kSteps))
      ADD_FAILURE() << "mode " << static_cast<int>(mode) << ": " << line;
  }
}

TEST_P(BackendTest, AgreesOverSeveralStreamsHoweverLateTheirOperationsRun) {
  for (CheckMode mode : {CheckMode::fast, CheckMode::check})
    for (const int num_streams : {2, 5})
      for (std::uint64_t seed = 0; seed < 3; ++seed) {
        ToyPlan plan = GetParam();
        plan.config.check = mode;
        plan.config.num_streams = num_streams;
        plan.config.delay_streams = true;
        plan.config.seed = seed;
        for (const std::string& line : toy_differences(plan, 12))
          ADD_FAILURE() << "mode " << static_cast<int>(mode) << ", " << num_streams
                        << " streams, seed " << seed << ": " << line;
      }
}

// Graphs of up to 8 tokens: decodes are replayed, most prompt chunks are too large.
TEST_P(BackendTest, AgreesWithStepsFromCapturedGraphs) {
  for (CheckMode mode : {CheckMode::fast, CheckMode::check, CheckMode::hunt})
    for (const int num_streams : {1, 3}) {
      ToyPlan plan = GetParam();
      plan.config.check = mode;
      plan.config.max_cudagraph_capture_size = 8;
      plan.config.num_streams = num_streams;
      plan.config.delay_streams = num_streams > 1;
      for (const std::string& line : toy_differences(plan, kSteps))
        ADD_FAILURE() << "mode " << static_cast<int>(mode) << ", " << num_streams
                      << " streams: " << line;
    }
}

// Another data parallel rank may have no graph: every second step runs eagerly.
TEST_P(BackendTest, ReplaysNoGraphInAStepThatRunsEagerly) {
  ToyPlan plan = GetParam();
  plan.config.max_cudagraph_capture_size = 8;
  auto backend = make_simt_backend(plan.config);
  ASSERT_TRUE(backend) << backend.error().message;
  ToyEngine engine(plan);
  StepReadback readback;
  for (int step = 0; step < kSteps; ++step) {
    StepProgram program = engine.next_step();
    program.agreed.is_eager = step % 2 == 1;
    const GraphStatistics before = (*backend)->graph_statistics();
    const auto done = (*backend)->execute(program, readback);
    ASSERT_TRUE(done) << done.error().message;
    for (const std::string& line : engine.compare(readback)) ADD_FAILURE() << step << ": " << line;
    const GraphStatistics after = (*backend)->graph_statistics();
    if (program.agreed.is_eager) {
      EXPECT_EQ(after.captured, before.captured) << "step " << step;
      EXPECT_EQ(after.replayed, before.replayed) << "step " << step;
    }
  }
  for (const std::string& line : engine.compare_pages(**backend)) ADD_FAILURE() << line;
  EXPECT_GT((*backend)->graph_statistics().replayed, 0);
}

INSTANTIATE_TEST_SUITE_P(Plans, BackendTest, ::testing::ValuesIn(toy_plans()),
                         [](const auto& plan) {
                           std::string name = plan.param.name;
                           for (char& c : name)
                             if (!std::isalnum(static_cast<unsigned char>(c))) c = '_';
                           return name;
                         });

TEST(Backend, AHundredSeedsOfHuntModeGiveTheSameBytes) {
  for (ToyPlan plan : toy_plans()) {
    if (plan.name != "hybrid, FlashAttention, kernel blocks of 32") continue;
    plan.config.check = CheckMode::hunt;
    for (plan.config.seed = 0; plan.config.seed < 100; ++plan.config.seed)
      for (const std::string& line : toy_differences(plan, 3))
        ADD_FAILURE() << "seed " << plan.config.seed << ": " << line;
  }
}

TEST(Backend, WhoWroteAByteIsTheKernelThreadAndStepThatDid) {
  ToyPlan plan = toy_plans().front();
  plan.config.check = CheckMode::check;
  auto backend = make_simt_backend(plan.config);
  ASSERT_TRUE(backend) << backend.error().message;
  EXPECT_EQ((*backend)->who_wrote({0, BlockId{1}}, 0)->kernel, "poison_blocks");
  EXPECT_EQ((*backend)->who_wrote({0, BlockId{1}}, 0)->step, -1);
  ToyEngine engine(plan);
  StepReadback readback;
  ASSERT_TRUE((*backend)->execute(engine.next_step(), readback));
  const auto writer = (*backend)->who_wrote({0, BlockId{1}}, 0);
  ASSERT_TRUE(writer);
  EXPECT_EQ(writer->kernel, "write_rows");
  EXPECT_EQ(writer->step, 1);
  EXPECT_EQ(writer->thread.substr(0, 6), "cta 0 ");
}

// In mode fast accesses are not checked, but a write past a tensor is found.
TEST(Backend, AWritePastATensorIsFoundInItsGuardZone) {
  for (const bool planted : {false, true}) {
    const auto plans = toy_plans();
    ToyPlan plan = *std::ranges::find(plans, "MLA", &ToyPlan::name);
    plan.config.mutant = planted ? "write-past-page" : "";
    auto backend = make_simt_backend(plan.config);
    ASSERT_TRUE(backend) << backend.error().message;
    StepProgram program;  // fills the last block of the pool
    const auto block_size = static_cast<std::int32_t>(plan.config.plan.groups[0].spec.block_size);
    const auto last_block = static_cast<std::int32_t>(plan.config.plan.num_blocks - 1);
    program.table_updates = {{.row = 0, .group = 0, .first = 0, .begin = 0, .count = 1}};
    program.table_block_ids = {BlockId{last_block}};
    program.rows = {{.row = 0, .first_position = 0, .num_tokens = block_size, .first_token = 0}};
    program.contents.assign(static_cast<std::size_t>(block_size), 7);
    program.num_padded_tokens = block_size;
    StepReadback readback;
    ASSERT_TRUE((*backend)->execute(program, readback));
    ASSERT_EQ(readback.reports.size(), planted ? 1u : 0u);
    if (!planted) continue;
    EXPECT_EQ(readback.reports[0].message,
              "guard zone: a write 0 bytes past the end of KV cache tensor 0");
    ASSERT_TRUE((*backend)->execute(StepProgram{}, readback));
    EXPECT_TRUE(readback.reports.empty()) << "the zone is not whole again";
  }
}

TEST(Backend, AnUnknownMutantIsRefusedByNameAndTheKnownOnesAreListed) {
  ToyPlan plan = toy_plans().front();
  plan.config.mutant = "no-such-defect";
  const auto backend = make_simt_backend(plan.config);
  ASSERT_FALSE(backend);
  EXPECT_NE(backend.error().message.find("no-such-defect"), std::string::npos);
  EXPECT_NE(backend.error().message.find("wrong-stride"), std::string::npos);
}

TEST(Backend, KernelBlockSizesOtherThanTheViewsAreRefused) {
  ToyPlan plan = toy_plans().front();
  plan.config.kernel_block_sizes = {8};
  const auto backend = make_simt_backend(plan.config);
  ASSERT_FALSE(backend);
  EXPECT_NE(backend.error().message.find("kernel_block_sizes"), std::string::npos);
}

TEST(Backend, APoolThatTheDeviceCannotHoldIsAnErrorNotACrash) {
  ToyPlan plan = toy_plans().front();
  for (KVCacheTensor& tensor : plan.config.plan.tensors) tensor.size_bytes = std::int64_t{1} << 48;
  plan.config.plan.num_blocks = std::int64_t{1} << 24;
  EXPECT_FALSE(make_simt_backend(plan.config));
}

TEST(GpuBackend, AMissingGpuIsAnErrorWithItsReason) {
  std::string why;
  if (gpu_available(&why)) GTEST_SKIP() << "there is a GPU here";
  EXPECT_FALSE(why.empty());
  const auto backend = make_gpu_backend(toy_plans().front().config);
  ASSERT_FALSE(backend);
  EXPECT_EQ(backend.error().message, why);
}

TEST(GpuBackend, AgreesWithTheToyEngine) {
  std::string why;
  if (!gpu_available(&why)) GTEST_SKIP() << why;
  for (const ToyPlan& plan : toy_plans()) {
    auto backend = make_gpu_backend(plan.config);
    ASSERT_TRUE(backend) << backend.error().message;
    ToyEngine engine(plan);
    StepReadback readback;
    for (int step = 0; step < kSteps; ++step) {
      ASSERT_TRUE((*backend)->execute(engine.next_step(), readback));
      for (const std::string& line : engine.compare(readback)) ADD_FAILURE() << plan.name << line;
      for (const std::string& line : engine.compare_pages(**backend))
        ADD_FAILURE() << plan.name << line;
    }
  }
}

}  // namespace
}  // namespace lockstep
