// Every CUDA call fails once, each in its own run. The run reports it in one line, never reports
// unread results as agreed, and releases everything.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>

#include "cuda_backend/backend/cuda_backend.h"
#include "properties/generate/generator.h"
#include "properties/judge/judge.h"
#include "tests/cuda_backend/toy_engine.h"
#include "tests/cuda_runtime/simulated_cuda.h"
#include "tests/cuda_runtime/simulated_gpu_device.h"

namespace lockstep::cuda {
namespace {

// Batches of one size come often enough to be captured and replayed.
constexpr int kStepsToFail = 7;

struct Replay {
  std::vector<std::string> found;
  std::int64_t calls = 0;  // before the releases at its end
};

Replay run_on(SimulatedCuda& runtime, const ToyPlan& plan) {
  auto device = make_simulated_gpu_device();
  if (!device) return {{"refused: " + device.error().message}, runtime.num_calls()};
  auto backend = make_backend(std::move(*device), plan.config);
  if (!backend) return {{"refused: " + backend.error().message}, runtime.num_calls()};
  Replay run;
  run.found = toy_differences(plan, **backend, kStepsToFail);
  run.calls = runtime.num_calls();
  return run;
}

ToyPlan plan_with_everything() {
  const auto plans = toy_plans();
  ToyPlan plan =
      *std::ranges::find(plans, "full attention and two windows share tensors", &ToyPlan::name);
  plan.length = 12;
  plan.config.num_streams = 2;
  plan.config.max_cudagraph_capture_size = 8;
  plan.config.num_host_blocks = 2;
  return plan;
}

// Every `stride`-th call, from `first` on; says which functions they were.
std::set<std::string> fail_calls(const ToyPlan& plan, SimulatedCudaOptions options,
                                 std::int64_t first, std::int64_t stride) {
  std::set<std::string> failed;
  std::int64_t calls = 0, calls_at_end = 0;
  {
    SimulatedCuda runtime;
    const Replay run = run_on(runtime, plan);
    EXPECT_TRUE(run.found.empty()) << run.found.front();
    calls = run.calls;
    calls_at_end = runtime.num_calls();
  }
  EXPECT_GT(calls, 100);
  for (options.failing_call = first; options.failing_call < calls_at_end;
       options.failing_call += stride) {
    SimulatedCuda runtime(options);
    const Replay run = run_on(runtime, plan);
    SCOPED_TRACE("call " + std::to_string(options.failing_call) + ", " + runtime.failed_function());
    failed.insert(runtime.failed_function());
    EXPECT_EQ(runtime.live(), LiveObjects());
    if (options.failing_call >= calls) {  // the failure has no receiver
      EXPECT_TRUE(run.found.empty()) << run.found.front();
      continue;
    }
    EXPECT_EQ(run.found.size(), 1u);
    if (run.found.empty()) continue;
    EXPECT_TRUE(run.found[0].ends_with(std::string(": ") + cudaGetErrorString(options.error)))
        << run.found[0];
    EXPECT_EQ(std::ranges::count(run.found[0], '\n'), 0);
  }
  return failed;
}

constexpr std::int64_t kSome = 7;
constexpr SimulatedCudaOptions kOnce = {};
constexpr SimulatedCudaOptions kForGood = {.error = cudaErrorIllegalAddress, .sticks = true};
constexpr std::size_t kFunctions = 23;  // of toolkit/cuda_runtime.h that can fail, and launches

TEST(FailingCuda, ACallThatFailsOnceIsTheRunsOneErrorAndNothingLeaks) {
  EXPECT_GT(fail_calls(plan_with_everything(), kOnce, 0, kSome).size(), kFunctions / 3);
}
TEST(FailingCuda, AnErrorThatSticksIsReportedOnceAndNothingLeaks) {
  EXPECT_GT(fail_calls(plan_with_everything(), kForGood, 5, kSome).size(), kFunctions / 3);
}
TEST(FailingCudaSlow, EveryCallOfARunFailsOnce) {
  EXPECT_EQ(fail_calls(plan_with_everything(), kOnce, 0, 1).size(), kFunctions);
}
TEST(FailingCudaSlow, EveryCallOfARunFailsForGood) {
  EXPECT_EQ(fail_calls(plan_with_everything(), kForGood, 0, 1).size(), kFunctions);
}

// To a judge it is neither the case's fault, as a refusal would be, nor agreement.
TEST(FailingCuda, InTheMiddleOfAJudgedRunItIsAViolationAndBeforeItARefusal) {
  const SavedCase saved = generate_case(std::uint64_t{2}, {.check = "fast"});
  std::int64_t calls_of_start = 0;
  const BackendFactory on_gpu =
      [&](const BackendConfig& config) -> Result<std::unique_ptr<Backend>> {
    auto device = make_simulated_gpu_device();
    if (!device) return tl::unexpected(device.error());
    auto backend = make_backend(std::move(*device), config);
    calls_of_start = SimulatedCuda::current().num_calls();
    return backend;
  };
  {
    SimulatedCuda runtime;
    ASSERT_EQ(judge(saved, on_gpu).kind, OutcomeKind::agreed);
    ASSERT_GT(runtime.num_calls(), calls_of_start + 100);
  }
  for (const bool in_the_middle : {true, false}) {
    SimulatedCuda runtime({.failing_call = calls_of_start + (in_the_middle ? 100 : -1),
                           .error = cudaErrorLaunchFailure,
                           .sticks = true});
    const Outcome outcome = judge(saved, on_gpu);
    EXPECT_EQ(outcome.kind, in_the_middle ? OutcomeKind::violation : OutcomeKind::refused);
    EXPECT_EQ(outcome.check, in_the_middle ? "device" : "");
    EXPECT_EQ(outcome.step >= 0, in_the_middle);
    EXPECT_TRUE(outcome.what.ends_with(": unspecified launch failure")) << outcome.what;
    EXPECT_EQ(runtime.live(), LiveObjects());
  }
}

TEST(FailingCuda, AnyFailedAllocationIsNamedAndTheRestIsReleased) {
  const ToyPlan plan = plan_with_everything();
  std::int64_t needed = 0;
  int refused = 0;
  for (std::int64_t room = 1 << 10; needed == 0; room += room / 4) {
    SimulatedCuda runtime({.device_bytes = room});
    const Replay run = run_on(runtime, plan);
    EXPECT_EQ(runtime.live(), LiveObjects());
    if (run.found.empty()) {
      needed = room;
      continue;
    }
    ++refused;
    EXPECT_EQ(run.found.size(), 1u);
    EXPECT_NE(run.found[0].find(": cudaMalloc of "), std::string::npos) << run.found[0];
    EXPECT_TRUE(run.found[0].ends_with("bytes: out of memory")) << run.found[0];
  }
  EXPECT_GT(refused, 10);
}

}  // namespace
}  // namespace lockstep::cuda
