#include "tests/cuda_backend/simt_kernels/scale.h"

namespace lockstep {
namespace SIMT_VARIANT {

__global__ void scale_kernel(float* data, float factor, std::int64_t count) {
  const std::int64_t i = std::int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) data[i] *= factor;
}

simt::error_t launch_scale(simt::stream_t stream, float* data, float factor, std::int64_t count) {
  const auto ctas = static_cast<unsigned>((count + 127) / 128);
  const simt::LaunchConfig config{dim3(ctas), dim3(128), 0, stream, "scale"};
  return simt::launch(config, scale_kernel, data, factor, count);
}

const ScaleKernels scale_kernels = {launch_scale};

}  // namespace SIMT_VARIANT
}  // namespace lockstep
