// The device of the tests of single kernels (tests/cuda_backend/kernel_device.h), here a simulated
// GPU: what a test does on a GPU, and on no other device, has run before there is one. Devices that
// live at one time share a runtime, and give back all that they took of it.
#include "tests/cuda_backend/kernel_device.h"

#include <memory>

#include "tests/cuda_runtime/simulated_cuda.h"
#include "tests/cuda_runtime/simulated_gpu_device.h"

namespace lockstep::cuda {
namespace {

struct Runtime {
  explicit Runtime(std::uint64_t seed) : cuda(SimulatedCudaOptions{.seed = seed}) {}
  ~Runtime() {
    if (cuda.live() != LiveObjects()) fail_test("a device has not given back all that it took");
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
