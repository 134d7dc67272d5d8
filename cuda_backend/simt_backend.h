// The CUDA backend on the CPU: the kernels of kernels/ run by the SIMT executor (simt/), on a
// sparse arena that stands for device memory. CheckMode::fast runs the plain build of the kernels,
// check and hunt the build that watches every memory access; then StepReadback::reports says what
// was found, and who_wrote() names the last writer of a byte.
#pragma once

#include <memory>

#include "base/result.h"
#include "sim/protocol/backend.h"

namespace lockstep {

// Errors: a mutant that backend_mutants.h does not know; a plan that layer_caches.h cannot address.
Result<std::unique_ptr<Backend>> make_simt_backend(const BackendConfig& config);

}  // namespace lockstep
