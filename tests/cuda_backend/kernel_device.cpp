#include "tests/cuda_backend/kernel_device.h"

#include <cstdlib>
#include <string_view>

#include "cuda_backend/backends.h"
#include "cuda_backend/device/simt_device.h"
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

}  // namespace

bool runs_on_gpu() { return asked_for() == "cuda"; }

std::string why_no_kernel_device() {
  const std::string_view device = asked_for();
  std::string why;
  if (device != "simt" && device != "cuda")
    why = std::string(kVariable) + ": '" + std::string(device) + "' is neither simt nor cuda";
  else if (runs_on_gpu())
    gpu_available(&why);
  return why;
}

std::shared_ptr<void> surroundings_of_devices() { return nullptr; }

Result<std::unique_ptr<Device>> make_kernel_device(CheckMode mode, std::uint64_t seed,
                                                   std::int64_t pool_size_bytes) {
  if (!runs_on_gpu()) return make_simt_device(mode, seed, pool_size_bytes);
#if LOCKSTEP_HAVE_CUDA
  return make_gpu_device(0);
#else
  return fail("no GPU: this build has no CUDA");
#endif
}

}  // namespace lockstep::cuda
