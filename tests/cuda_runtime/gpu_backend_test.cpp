// The whole backend over the device of a GPU on the simulated runtime: the same pages, digests and
// chains of hashes as the CPU executor gives, whatever order the streams run in.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cuda_backend/backend/cuda_backend.h"
#include "cuda_backend/backends.h"
#include "cuda_backend/device/simt_device.h"
#include "cuda_backend/views/rank_share.h"
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

// Kernels of another process: what they are given lies in one allocation, everything before a call
// is done, and pages are those of the executor.

constexpr std::int64_t kSharedBytes = std::int64_t{64} << 20;

// Writes rows as a process would that has opened the handle: at offsets, at once, on no stream.
class OtherProcess final : public UserKernels {
 public:
  OtherProcess(std::vector<KernelLayer> layers, std::int64_t* num_calls)
      : UserKernels(std::move(layers)), num_calls_(num_calls) {}
  std::string_view name() const override { return "cuda_kernels:a test's"; }
  bool has(std::string_view function) const override {
    return function == "write" || function == "write_latent";
  }
  bool in_process() const override { return false; }
  bool on_gpu() const override { return true; }

  std::optional<KernelFailure> call(const KernelCall& call) override {
    ++*num_calls_;
    EXPECT_EQ(call.memory_handle.size(), 128U);
    EXPECT_FALSE(SimulatedCuda::current().streams.run_one()) << "work before the call is left";
    const KernelTensor *cache = nullptr, *slots = nullptr;
    std::vector<const KernelTensor*> rows;
    for (const KernelTensor& tensor : call.tensors) {
      EXPECT_GE(tensor.address - call.memory, 0);
      EXPECT_LT(tensor.address - call.memory, kSharedBytes) << tensor.name;
      if (tensor.name == "kv_cache") cache = &tensor;
      if (tensor.name == "slot_mapping") slots = &tensor;
      if (tensor.name == "key" || tensor.name == "value") rows.push_back(&tensor);
    }
    const std::size_t first = cache->shape.size() == 5 ? 1 : 0;  // after K and V
    const std::int64_t block_size = cache->shape[first + 1], heads = rows[0]->shape[1];
    for (std::int64_t token = 0; token < slots->shape[0]; ++token) {
      std::int64_t slot = 0;
      std::memcpy(&slot, slots->address + token * slots->strides[0], sizeof slot);
      if (slot < 0) continue;
      for (std::size_t part = 0; part < rows.size(); ++part)
        for (std::int64_t head = 0; head < heads; ++head) {
          const std::byte* to = cache->address + slot / block_size * cache->strides[first] +
                                slot % block_size * cache->strides[first + 1];
          if (first == 1)
            to += static_cast<std::int64_t>(part) * cache->strides[0] + head * cache->strides[3];
          std::memcpy(const_cast<std::byte*>(to),
                      rows[part]->address + token * rows[part]->strides[0] +
                          head * rows[part]->strides[1],
                      static_cast<std::size_t>(cache->shape.back() * cache->strides.back()));
        }
    }
    return std::nullopt;
  }

 private:
  std::int64_t* num_calls_;
};

Result<std::unique_ptr<Backend>> make_backend_of_process(BackendConfig config,
                                                         std::int64_t shared_bytes,
                                                         std::int64_t* num_calls) {
  config.delay_streams = false;
  config.num_streams = 1;
  LS_ASSIGN_OR_RETURN(const auto share, cuda::share_of_rank(config));
  auto kernels =
      std::make_shared<OtherProcess>(kernel_layers(share.plan, config.numbers), num_calls);
  LS_ASSIGN_OR_RETURN(auto device, cuda::make_simulated_gpu_device(shared_bytes));
  return cuda::make_backend(
      std::move(device), config,
      {.device = [kernels](std::unique_ptr<cuda::Device> inner, cuda::Device&) {
        return cuda::make_user_kernels_device(std::move(inner), kernels);
      }});
}

SavedCase case_of_words(std::uint64_t seed) {
  GeneratorOptions options;
  options.check = "fast";
  options.never = {Feature::captured_graphs, Feature::real_numbers};
  return generate_case(seed, options);
}

TEST(KernelsOfAProcess, LeaveThePagesOfTheExecutor) {
  std::int64_t num_calls = 0;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE(seed);
    const SavedCase saved = case_of_words(seed);
    SimulatedCuda runtime({.seed = seed});
    const Judged found = judged(saved, [&](const BackendConfig& config) {
      return make_backend_of_process(config, kSharedBytes, &num_calls);
    });
    const Judged expected = judged(saved, make_simt_backend);
    EXPECT_EQ(found.outcome, expected.outcome) << found.outcome.what;
    EXPECT_EQ(found.hashes, expected.hashes);
    EXPECT_EQ(runtime.live(), LiveObjects());
  }
  EXPECT_GT(num_calls, 100);
}

TEST(KernelsOfAProcess, TheirMemoryIsOneAllocationAndSaysWhenItIsFull) {
  SimulatedCuda runtime;
  auto device = cuda::make_simulated_gpu_device(1024);
  ASSERT_TRUE(device);
  EXPECT_EQ(runtime.live().device_memory, 1);
  std::byte* first = (*device)->allocate(1, "first");
  EXPECT_EQ(first, (*device)->memory_begin());
  EXPECT_EQ((*device)->allocate(700, "second"), first + 256);
  EXPECT_EQ((*device)->allocate(100, "third"), nullptr);
  const auto finished = (*device)->finish();
  ASSERT_FALSE(finished);
  EXPECT_EQ(finished.error().message, "third: 1024 bytes of shared memory are too few");
}

}  // namespace
}  // namespace lockstep
