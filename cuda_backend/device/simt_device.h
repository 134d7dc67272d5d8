// A device on the CPU: the SIMT executor behind the interface of device.h.
#pragma once

#include <cstdint>
#include <memory>

#include "base/result.h"
#include "cuda_backend/device/device.h"
#include "sim/protocol/backend.h"

namespace lockstep::cuda {

// pool_size_bytes: what will be allocated for the cache; the arena is laid out for it and as much
// again.
Result<std::unique_ptr<Device>> make_simt_device(CheckMode mode, std::uint64_t seed,
                                                 std::int64_t pool_size_bytes);

}  // namespace lockstep::cuda
