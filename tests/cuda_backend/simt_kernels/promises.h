// Kernels whose launches declare what they touch.
#pragma once

#include <cstdint>

#include "cuda_backend/simt/simt.h"

namespace lockstep {

struct PromiseKernels {
  using stream_t = simt::stream_t;
  using error_t = simt::error_t;

  // Thread i: to[i] = from[i] + 1.
  error_t (*add_one)(stream_t, int* to, const int* from, int count);
  // One thread: to[i] = from[i], in ascending order.
  error_t (*shift)(stream_t, int* to, const int* from, int count);
};
SIMT_DECLARE_IN_VARIANTS(extern const PromiseKernels promise_kernels;)

}  // namespace lockstep
