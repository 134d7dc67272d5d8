#include "tests/cuda_backend/kernel_device.h"

#include <cstdlib>
#include <string_view>

#include "cuda_backend/device/simt_device.h"
#include "cuda_backend/gpu_backend.h"
#if LOCKSTEP_HAVE_CUDA
#include "cuda_backend/gpu/gpu_device.h"
#endif

namespace lockstep::cuda {
namespace {

constexpr const char* kVariable = "LOCKSTEP_TEST_DEVICE";

std::string_view asked_for() {
  const char* device = std::getenv(kVariable);
  return device == nullptr ? "simt" : device;
}

// Before the first test: a word that means nothing fails the run, a GPU that is not there skips it.
class DeviceOfTests : public ::testing::Environment {
  void SetUp() override {
    const std::string_view device = asked_for();
    if (device != "simt" && device != "cuda")
      FAIL() << kVariable << ": '" << device << "' is neither simt nor cuda";
    std::string why;
    if (runs_on_gpu() && !gpu_available(&why)) GTEST_SKIP() << why;
  }
};
const ::testing::Environment* const device_of_tests =
    ::testing::AddGlobalTestEnvironment(new DeviceOfTests);

}  // namespace

bool runs_on_gpu() { return asked_for() == "cuda"; }

Result<std::unique_ptr<Device>> make_kernel_device(CheckMode mode, std::uint64_t seed,
                                                   std::int64_t pool_size_bytes) {
  if (!runs_on_gpu()) return make_simt_device(mode, seed, pool_size_bytes);
#if LOCKSTEP_HAVE_CUDA
  return make_gpu_device();
#else
  return fail("no GPU: this build has no CUDA");
#endif
}

}  // namespace lockstep::cuda
