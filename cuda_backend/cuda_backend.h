// The backend of the lockstep on any device: executes a StepProgram with block tables, slot
// mappings, views and memory of its own. See sim/protocol/backend.h for the protocol and device.h
// for what runs it.
#pragma once

#include <memory>

#include "base/result.h"
#include "cuda_backend/device.h"
#include "sim/protocol/backend.h"

namespace lockstep::cuda {

// Errors: an unknown mutant; a plan whose views cannot be derived; no room for it on the device.
Result<std::unique_ptr<Backend>> make_backend(std::unique_ptr<Device> device, BackendConfig config);

}  // namespace lockstep::cuda
