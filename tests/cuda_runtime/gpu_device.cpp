// The device of a GPU as it is, compiled against the stand-in for the toolkit.
#include "tests/cuda_runtime/queued_kernels.h"

#include "cuda_backend/gpu/gpu_device.cu"
