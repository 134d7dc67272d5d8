// The device of the tests of single kernels (tests/cuda_backend/kernel_device.h), here a simulated
// GPU: the code that a test runs only on a GPU has run without one. Devices that live at the same
// time share a runtime, and release all of its objects.
#include "tests/cuda_backend/kernel_device.h"

#include <memory>

#include "tests/cuda_runtime/simulated_cuda.h"
#include "tests/cuda_runtime/simulated_gpu_device.h"

namespace lockstep::cuda {
namespace {

struct Runtime {
  explicit Runtime(std::uint64_t seed) : cuda(SimulatedCudaOptions{.seed = seed}) {}
  ~Runtime() {
    if (cuda.live() != LiveObjects()) fail_test("a device has not released all of its objects");
  }
  SimulatedCuda cuda;
};

}  // namespace

std::shared_ptr<void> surroundings_of_devices() {
  static std::weak_ptr<Runtime> shared;
  static std::uint64_t seed = 0;
  std::shared_ptr<Runtime> runtime = shared.lock();
  if (runtime == nullptr) shared = runtime = std::make_shared<Runtime>(++seed);
  return runtime;
}

std::string why_no_kernel_device() { return {}; }

bool runs_on_gpu() { return true; }

Result<std::unique_ptr<Device>> make_kernel_device(CheckMode, std::uint64_t, std::int64_t) {
  return make_simulated_gpu_device();
}

}  // namespace lockstep::cuda
