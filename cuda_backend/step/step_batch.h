// How many tokens the captured parts of a step run: those of its batch, or as many as data parallel
// ranks have agreed on.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda_backend/device/device.h"
#include "sim/protocol/backend.h"

namespace lockstep::cuda {

// The size of the graph that takes them all; where none does, the number of them.
inline std::int32_t step_batch(const Device& device, const StepProgram& program) {
  const auto num_tokens = static_cast<std::int32_t>(program.contents.size());
  const std::int32_t size = device.padded_batch(std::max(num_tokens, program.agreed.num_tokens));
  return device.captures(size) ? size : num_tokens;
}

}  // namespace lockstep::cuda
