// The device of the tests of single kernels (tests/cuda_backend/kernel_device.h), here a simulated
// GPU: what a test does on a GPU, and on no other device, has run before there is one. Each test
// has a runtime of its own.
#include "tests/cuda_backend/kernel_device.h"

#include <memory>

#include "tests/cuda_runtime/simulated_cuda.h"
#include "tests/cuda_runtime/simulated_gpu_device.h"

namespace lockstep::cuda {
namespace {

class RuntimeOfATest : public ::testing::EmptyTestEventListener {
  void OnTestStart(const ::testing::TestInfo&) override {
    runtime_ = std::make_unique<SimulatedCuda>(SimulatedCudaOptions{.seed = ++seed_});
  }
  void OnTestEnd(const ::testing::TestInfo&) override {
    EXPECT_EQ(runtime_->live(), LiveObjects());
    runtime_.reset();
  }
  std::uint64_t seed_ = 0;
  std::unique_ptr<SimulatedCuda> runtime_;
};

class RuntimeOfEveryTest : public ::testing::Environment {
  void SetUp() override {
    ::testing::UnitTest::GetInstance()->listeners().Append(new RuntimeOfATest());
  }
};
const ::testing::Environment* const runtime_of_every_test =
    ::testing::AddGlobalTestEnvironment(new RuntimeOfEveryTest);

}  // namespace

bool runs_on_gpu() { return true; }

Result<std::unique_ptr<Device>> make_kernel_device(CheckMode, std::uint64_t, std::int64_t) {
  return make_simulated_gpu_device();
}

}  // namespace lockstep::cuda
