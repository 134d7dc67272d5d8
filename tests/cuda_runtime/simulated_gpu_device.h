// The functions of cuda_backend/gpu/gpu_device.h over the simulated runtime (simulated_cuda.h):
// gpu_device.cpp compiles their source under these names.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/result.h"
#include "cuda_backend/device/device.h"

namespace lockstep::cuda {

std::string why_no_simulated_gpu();
Result<std::unique_ptr<Device>> make_simulated_gpu_device(std::int64_t shared_bytes);
inline Result<std::unique_ptr<Device>> make_simulated_gpu_device() {
  return make_simulated_gpu_device(0);
}

}  // namespace lockstep::cuda
