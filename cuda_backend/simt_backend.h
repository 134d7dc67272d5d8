// The CUDA backend on the CPU: the SIMT executor (simt/) runs the kernels of kernels/ on a sparse
// arena in place of device memory. CheckMode::fast runs the plain build of the kernels,
// check and hunt the build that watches every memory access. StepReadback::reports has the
// findings, and who_wrote() returns the last writer of a byte.
#pragma once

#include <memory>

#include "base/result.h"
#include "sim/protocol/backend.h"
#include "sim/protocol/user_kernels.h"

namespace lockstep {

// Errors: an unknown mutant; a plan that layer_caches.h cannot address.
Result<std::unique_ptr<Backend>> make_simt_backend(const BackendConfig& config);

// The same with a user's kernels (cuda_backend/device/simt_device.h), on a shared arena or a GPU.
// Errors: a check mode other than fast, a planted defect, several streams, captured graphs; no GPU.
Result<std::unique_ptr<Backend>> make_user_kernels_backend(const BackendConfig& config,
                                                           std::shared_ptr<UserKernels> kernels);

}  // namespace lockstep
