// A device on the CPU: the SIMT executor with the interface of device.h.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/result.h"
#include "cuda_backend/device/device.h"
#include "sim/protocol/backend.h"

namespace lockstep::cuda {

// pool_size_bytes: bytes of the cache. The arena has room for twice as much. shared_file: a file in
// memory that the arena maps and that another process may map; empty: private memory.
Result<std::unique_ptr<Device>> make_simt_device(CheckMode mode, std::uint64_t seed,
                                                 std::int64_t pool_size_bytes,
                                                 const std::string& shared_file = {});

}  // namespace lockstep::cuda
