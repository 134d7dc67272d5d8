// The backend of the lockstep on any device: executes a StepProgram with its own block tables, slot
// mappings, views and memory. sim/protocol/backend.h is the protocol, device.h the device.
#pragma once

#include <functional>
#include <memory>
#include <span>

#include "base/result.h"
#include "cuda_backend/device/device.h"
#include "cuda_backend/streams/step_graph.h"
#include "cuda_backend/views/rank_share.h"
#include "sim/protocol/backend.h"

namespace lockstep::cuda {

// Extension points through which planted defects (cuda_backend/defects/) change what the backend's
// parts pass to each other. A healthy backend has none.
//
// 1. A null member changes nothing.
// 2. Members are called in this order, program and graph again in every step.
struct Seams {
  std::function<void(BackendConfig&)> config = nullptr;
  // Puts a device in front of all others. `base` is the device below captured graphs.
  std::function<std::unique_ptr<Device>(std::unique_ptr<Device>, Device& base)> device = nullptr;
  // Changes a rank's share. The configuration is that of the whole model.
  std::function<void(const BackendConfig&, RankShare&)> share = nullptr;
  // Replaces the views that kernels receive.
  std::function<Result<PoolViews>(const BackendConfig&)> views = nullptr;
  std::function<void(StepProgram&)> program = nullptr;
  std::function<void(std::span<const Operation>, StepGraph&)> graph = nullptr;
};

// Ignores BackendConfig::mutant: backend_mutants.h turns it into seams.
// Errors: a plan whose views cannot be derived; no room for it on the device.
Result<std::unique_ptr<Backend>> make_backend(std::unique_ptr<Device> device, BackendConfig config,
                                              Seams seams = {});

}  // namespace lockstep::cuda
