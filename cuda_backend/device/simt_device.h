// A device on the CPU: the SIMT executor with the interface of device.h.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/result.h"
#include "cuda_backend/device/device.h"
#include "sim/protocol/backend.h"
#include "sim/protocol/user_kernels.h"

namespace lockstep::cuda {

// pool_size_bytes: bytes of the cache. The arena has room for twice as much. shared_file: a file in
// memory that the arena maps and that another process may map; empty: private memory. num_threads:
// BackendConfig::num_threads.
Result<std::unique_ptr<Device>> make_simt_device(CheckMode mode, std::uint64_t seed,
                                                 std::int64_t pool_size_bytes,
                                                 const std::string& shared_file = {},
                                                 int num_threads = 1);

// A device whose cache writes, attention, slots, recurrent states, zeroing and copies of blocks are
// a user's kernels (sim/protocol/user_kernels.h). All other work stays with the inner device:
// tables, inputs, poison, the host tier, digests, fingerprints.
//
// Invariants:
// 1. A launch that the user's kernels take has no items left for the inner device's kernel.
// 2. A launch that they lack, or that no argument of their functions can describe, runs on the
//    inner device, and not_checked() names it.
// 3. After the first failed call no other call is made; take_reports() reports the failure.
// REQUIRES: one stream, without captured graphs; the device is in front of all others. Kernels of
// another process: the inner device shares its memory. On a GPU a call waits for all earlier work.

std::unique_ptr<Device> make_user_kernels_device(std::unique_ptr<Device> device,
                                                 std::shared_ptr<UserKernels> kernels);

}  // namespace lockstep::cuda
