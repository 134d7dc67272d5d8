// The backend of the lockstep on any device: executes a StepProgram with block tables, slot
// mappings, views and memory of its own. See sim/protocol/backend.h for the protocol and device.h
// for what runs it.
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

// Where a backend can be made to go wrong from outside: what its parts hand to each other passes
// here and may be changed on the way. A healthy backend has none; planted defects
// (cuda_backend/defects/) are nothing but such changes.
//
// A member that is null changes nothing. They are called in this order; the last two again in every
// step.
struct Seams {
  std::function<void(BackendConfig&)> config = nullptr;
  // Stands in front of all other devices; `base` is the device below captured graphs.
  std::function<std::unique_ptr<Device>(std::unique_ptr<Device>, Device& base)> device = nullptr;
  // What a rank holds; the configuration is that of the whole model.
  std::function<void(const BackendConfig&, RankShare&)> share = nullptr;
  // The views that kernels are given, in the place of those of the plan.
  std::function<Result<PoolViews>(const BackendConfig&)> views = nullptr;
  std::function<void(StepProgram&)> program = nullptr;
  std::function<void(std::span<const Operation>, StepGraph&)> graph = nullptr;
};

// Ignores BackendConfig::mutant: backend_mutants.h turns it into seams.
// Errors: a plan whose views cannot be derived; no room for it on the device.
Result<std::unique_ptr<Backend>> make_backend(std::unique_ptr<Device> device, BackendConfig config,
                                              Seams seams = {});

}  // namespace lockstep::cuda
