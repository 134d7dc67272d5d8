// The device of a GPU as it is, compiled against the stand-in for the toolkit. Only its names are
// others here: a build with CUDA links the true one in as well.
#include "tests/cuda_runtime/queued_kernels.h"
#include "tests/cuda_runtime/simulated_gpu_device.h"

#define make_gpu_device make_simulated_gpu_device
#define why_no_gpu why_no_simulated_gpu
#define simt_cuda simt_simulated
#include "cuda_backend/gpu/gpu_device.cu"
