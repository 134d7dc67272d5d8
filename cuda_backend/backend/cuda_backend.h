// The backend of the lockstep on any device: executes a StepProgram with block tables, slot
// mappings, views and memory of its own. See sim/protocol/backend.h for the protocol and device.h
// for what runs it.
#pragma once

#include <memory>

#include "base/result.h"
#include "cuda_backend/backend/seams.h"
#include "cuda_backend/device/device.h"
#include "sim/protocol/backend.h"

namespace lockstep::cuda {

// BackendConfig::mutant is not looked at: a defect is planted by its seams
// (cuda_backend/defects/backend_mutants.h).
// Errors: a plan whose views cannot be derived; no room for it on the device.
Result<std::unique_ptr<Backend>> make_backend(std::unique_ptr<Device> device, BackendConfig config,
                                              Seams seams = {});

}  // namespace lockstep::cuda
