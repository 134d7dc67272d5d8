// FlashInfer's paged append, from the headers of its Python package, as a workload: the same tokens
// to the same scattered slots of the same layout as write_bf16_nhd of engine_workloads.h.
#pragma once

#include <cstdint>

#include "tests/benchmarks/engine_workloads.h"

namespace lockstep::cuda {

Workload flashinfer_append(Device& device, std::int32_t num_tokens);

}  // namespace lockstep::cuda
