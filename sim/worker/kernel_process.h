// A user's Python class as kernels: `python -m lockstep_engines.user_kernels module:Class` in its
// own process. docs/check_your_kernels.md describes the class.
//
// 1. A process serves one run at a time; each run has its own memory. On a GPU the process closes
//    it before the run's UserKernels end.
// 2. A failed call fails the run. The next run continues with the same process after an exception,
//    and with a new one after a crash or a hang. On a GPU it is a new one in each case: an illegal
//    access leaves CUDA's context of a process unusable.
#pragma once

#include <memory>
#include <string>

#include "base/result.h"
#include "sim/foreign/foreign_engine.h"
#include "sim/protocol/user_kernels.h"

namespace lockstep {

// `command`: starts such a process.
ForeignEngineOptions kernel_process_options(std::string command);

// Begins a run over these layers. `on_gpu`: the command has --cuda. Errors: the process does not
// start, or refuses them.
Result<std::shared_ptr<UserKernels>> open_user_kernels(std::shared_ptr<ForeignEngines> processes,
                                                       std::vector<KernelLayer> layers,
                                                       bool on_gpu);

}  // namespace lockstep
