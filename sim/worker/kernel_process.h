// A user's Python class as kernels: `python -m lockstep_engines.user_kernels module:Class` in its
// own process. docs/check_your_kernels.md describes the class.
//
// Invariants
// (1) A process serves one run at a time; each run has its own memory. On a GPU the process closes
//     that memory before the run's UserKernels end.
// (2) A failed call fails the run. The next run continues with the same process after an exception,
//     and with a new one after a crash or a hang. On a GPU it is always a new one: an illegal
//     access leaves the process's CUDA context unusable.
#pragma once

#include <memory>
#include <string>

#include "base/result.h"
#include "sim/foreign/foreign_engine.h"
#include "sim/protocol/user_kernels.h"

namespace lockstep {

// Returns the options of a kernel process that `command` starts.
ForeignEngineOptions kernel_process_options(std::string command);

// Begins a run over these layers. `on_gpu`: the command has --cuda. Errors: the process does not
// start, or refuses the layers.
Result<std::shared_ptr<UserKernels>> open_user_kernels(std::shared_ptr<ForeignEngines> processes,
                                                       std::vector<KernelLayer> layers,
                                                       bool on_gpu);

}  // namespace lockstep
