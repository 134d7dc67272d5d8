// The CUDA backend on a GPU. In a build without CUDA these functions return that as their error.
#pragma once

#include <memory>
#include <string>

#include "base/result.h"
#include "sim/protocol/backend.h"

namespace lockstep {

// True if kernels can run here. Otherwise sets *why, if given, to the reason.
bool gpu_available(std::string* why = nullptr);

// Errors: no GPU (the text of gpu_available), not enough memory for the plan, an unknown mutant, a
// plan that layer_caches.h cannot address, a check mode other than fast (compute-sanitizer checks a
// GPU).
Result<std::unique_ptr<Backend>> make_gpu_backend(const BackendConfig& config);

}  // namespace lockstep
