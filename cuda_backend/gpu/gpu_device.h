// A GPU behind the interface of device.h: streams with events, plain allocations, downloads through
// pinned memory. Declared without CUDA's headers, so that only this folder needs a toolkit.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/result.h"
#include "cuda_backend/device/device.h"

namespace lockstep::cuda {

// Empty when the first GPU can be used; otherwise what is missing.
std::string why_no_gpu();

// `shared_bytes` of one allocation, from which every other is taken, and which another process can
// open by memory_handle(). 0: nothing is shared. Errors: no usable GPU, or too little memory.
Result<std::unique_ptr<Device>> make_gpu_device(std::int64_t shared_bytes);

}  // namespace lockstep::cuda
