// The tables that nvcc would make, for a simulated GPU: each launcher puts a call of the CPU
// executor's launcher of the same name, with the parameters of now, into its stream.
//
// 1. Whether a shape fits a grid is found out when a launch runs, and ends the test.
#pragma once

#include "cuda_backend/launch/kernel_table.h"

namespace lockstep::cuda::simt_simulated {

extern const KernelTable kernel_table;
extern const EngineKernels engine_kernels;

}  // namespace lockstep::cuda::simt_simulated
