#include "tests/cuda_backend/simt_kernels/promises.h"

namespace lockstep {
namespace SIMT_VARIANT {
namespace {

using simt::stream_t;

__global__ void add_one_kernel(int* to, const int* from, int count) {
  const int i = static_cast<int>(threadIdx.x);
  if (i < count) to[i] = from[i] + 1;
}
__global__ void shift_kernel(int* to, const int* from, int count) {
  for (int i = 0; i < count; ++i) to[i] = from[i];
}

}  // namespace

const PromiseKernels promise_kernels = {
    .add_one =
        [](stream_t s, int* to, const int* from, int count) {
          return simt::launch({dim3(1), dim3(32), 0, s, "add_one"}, add_one_kernel, to, from,
                              count);
        },
    .shift =
        [](stream_t s, int* to, const int* from, int count) {
          return simt::launch({dim3(1), dim3(1), 0, s, "shift"}, shift_kernel, to, from, count);
        },
};

}  // namespace SIMT_VARIANT
}  // namespace lockstep
