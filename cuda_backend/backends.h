// The CUDA backend: on the CPU, where the SIMT executor (simt/) runs the kernels of kernels/ on a
// sparse arena in place of device memory, on a GPU, and with a user's kernels.
//
// CheckMode::fast runs the plain build of the kernels, check and hunt the build that watches every
// memory access. StepReadback::reports has the findings, and who_wrote() returns the last writer of
// a byte.
#pragma once

#include <memory>
#include <string>

#include "base/result.h"
#include "sim/protocol/backend.h"
#include "sim/protocol/user_kernels.h"

namespace lockstep {

// Errors: an unknown mutant; a plan that layer_caches.h cannot address.
Result<std::unique_ptr<Backend>> make_simt_backend(const BackendConfig& config);

// True if kernels can run on a GPU here. Otherwise sets *why, if given, to the reason.
bool gpu_available(std::string* why = nullptr);

// Errors: no GPU (the text of gpu_available), not enough memory for the plan, those of
// make_simt_backend, a check mode other than fast (compute-sanitizer checks a GPU).
Result<std::unique_ptr<Backend>> make_gpu_backend(const BackendConfig& config);

// Errors: the kernels run on a GPU, and there is none.
Result<void> check_gpu_for(const UserKernels& kernels);

// A user's kernels (cuda_backend/device/simt_device.h), on a shared arena or a GPU.
// Errors: a check mode other than fast, a planted defect, several streams, captured graphs; no GPU.
Result<std::unique_ptr<Backend>> make_user_kernels_backend(const BackendConfig& config,
                                                           std::shared_ptr<UserKernels> kernels);

}  // namespace lockstep
