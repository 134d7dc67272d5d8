// The whole backend over the device of a GPU on the simulated runtime: the same pages, digests and
// chains of hashes as the CPU executor gives, whatever order the streams run in.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "cuda_backend/backend/cuda_backend.h"
#include "cuda_backend/backends.h"
#include "properties/generate/generator.h"
#include "properties/judge/judge.h"
#include "tests/cuda_backend/toy_engine.h"
#include "tests/cuda_runtime/simulated_cuda.h"
#include "tests/cuda_runtime/simulated_gpu_device.h"

namespace lockstep {
namespace {

using cuda::LiveObjects;
using cuda::SimulatedCuda;
using cuda::SimulatedCudaOptions;

constexpr int kSteps = 24;

Result<std::unique_ptr<Backend>> make_backend_on_gpu(BackendConfig config) {
  config.delay_streams = false;  // a GPU orders its streams itself
  auto device = cuda::make_simulated_gpu_device();
  if (!device) return tl::unexpected(device.error());
  return cuda::make_backend(std::move(*device), std::move(config));
}

std::vector<std::string> differences_on_gpu(const ToyPlan& plan, int steps,
                                            const SimulatedCudaOptions& options) {
  SimulatedCuda runtime(options);
  std::vector<std::string> found;
  {
    auto backend = make_backend_on_gpu(plan.config);
    if (!backend) return {"refused: " + backend.error().message};
    found = toy_differences(plan, **backend, steps);
  }
  EXPECT_EQ(runtime.live(), LiveObjects());
  EXPECT_EQ(runtime.run_all(), cudaSuccess) << "work was left that used what had gone";
  return found;
}

void expect_agreement(ToyPlan plan, std::uint64_t first_seed, std::uint64_t num_seeds) {
  plan.config.num_host_blocks = 2;
  for (const int num_streams : {1, 2, 3, 4})
    for (const int captured : {0, 8})
      for (std::uint64_t seed = first_seed; seed < first_seed + num_seeds; ++seed) {
        plan.config.num_streams = num_streams;
        plan.config.max_cudagraph_capture_size = captured;
        for (const std::string& line : differences_on_gpu(plan, kSteps, {.seed = seed}))
          ADD_FAILURE() << plan.name << ", " << num_streams << " streams, graphs of " << captured
                        << ", seed " << seed << ": " << line;
      }
}

TEST(SimulatedGpuBackend, AgreesWithTheToyEngineOverAnyNumberOfStreamsWithGraphsAndWithout) {
  const std::set<std::string> names = {"pairs apart, HND, rows of 12 bytes",
                                       "full attention and two windows share tensors",
                                       "hybrid, FlashAttention, kernel blocks of 32", "two blocks"};
  for (const ToyPlan& plan : toy_plans())
    if (names.contains(plan.name)) expect_agreement(plan, 0, 1);
}
TEST(SimulatedGpuBackendSlow, AgreesWithTheToyEngineForEveryPlanAndSeveralOrders) {
  for (const ToyPlan& plan : toy_plans()) expect_agreement(plan, 1, 2);
}

// Were the streams' order always that of the calls, nothing above would say anything.
TEST(SimulatedGpuBackend, WhereEventsOrderNothingPagesDiffer) {
  const auto plans = toy_plans();
  ToyPlan plan =
      *std::ranges::find(plans, "full attention and two windows share tensors", &ToyPlan::name);
  plan.config.num_streams = 3;
  int differ = 0;
  for (std::uint64_t seed = 0; seed < 10; ++seed)
    differ +=
        !differences_on_gpu(plan, kSteps, {.seed = seed, .drops_waits = true, .fresh = 0}).empty();
  EXPECT_GT(differ, 5);
}

struct Judged {
  Outcome outcome;
  std::vector<StateHash> hashes;
};

Judged judged(const SavedCase& saved, const BackendFactory& backend) {
  Judged result;
  result.outcome =
      judge(saved, JudgeOptions{.backend = backend, .observer = nullptr, .hashes = &result.hashes});
  return result;
}

// Whole runs of generated cases of one kind, on the executor and on the simulated GPU.
void expect_the_same_chains(const FeatureSet& always, std::uint64_t first_seed, int num_cases,
                            const FeatureSet& never = {}) {
  GeneratorOptions options;
  options.check = "fast";
  options.device_modes = true;
  options.always = always;
  options.never = never;
  int agreed = 0;
  for (std::uint64_t seed = first_seed; seed < first_seed + num_cases; ++seed) {
    SCOPED_TRACE(seed);
    const SavedCase saved = generate_case(seed, options);
    const Judged expected = judged(saved, make_simt_backend);
    SimulatedCuda runtime({.seed = seed});
    const Judged found = judged(saved, [&](BackendConfig config) {
      if (seed % 2 == 1) config.num_streams = 2 + static_cast<int>(seed / 2 % 3);
      return make_backend_on_gpu(std::move(config));
    });
    EXPECT_EQ(found.outcome, expected.outcome) << found.outcome.what;
    EXPECT_EQ(found.hashes, expected.hashes);
    EXPECT_EQ(runtime.live(), LiveObjects());
    agreed += expected.outcome.kind == OutcomeKind::agreed && !expected.hashes.empty();
  }
  EXPECT_GT(agreed, num_cases / 2);
}

TEST(SimulatedGpuBackend, GeneratedCasesHaveTheChainsOfTheExecutor) {
  expect_the_same_chains({}, 100, 20);
}
TEST(SimulatedGpuBackendSlow, ManyGeneratedCasesHaveThem) { expect_the_same_chains({}, 1000, 300); }
TEST(SimulatedGpuBackend, CasesWithRealNumbersHaveThem) {
  expect_the_same_chains({Feature::real_numbers}, 200, 8);
}
TEST(SimulatedGpuBackend, CasesWithRealStatesHaveThem) {
  expect_the_same_chains({Feature::real_numbers, Feature::states}, 300, 8);
}
TEST(SimulatedGpuBackend, CasesWithAHostTierInPinnedMemoryHaveThem) {
  expect_the_same_chains({Feature::host_tier}, 400, 12);
}
TEST(SimulatedGpuBackend, CasesWithCapturedGraphsHaveThem) {
  expect_the_same_chains({Feature::captured_graphs}, 500, 12);
}
// A part of a step that launches nothing is an empty graph.
TEST(SimulatedGpuBackend, CapturedGraphsOfStatesWithoutRowsHaveThem) {
  expect_the_same_chains({Feature::captured_graphs, Feature::states}, 600, 8,
                         {Feature::full_attention, Feature::mla, Feature::sliding_window,
                          Feature::chunked_local, Feature::hidden_state});
}

}  // namespace
}  // namespace lockstep
