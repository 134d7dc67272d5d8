// Kernels that say something about the memory they touch, and kernels that do not keep to it.
#pragma once

#include <cstdint>

#include "cuda_backend/simt/simt.h"

namespace lockstep {

struct PromiseKernels {
  using stream_t = simt::stream_t;
  using error_t = simt::error_t;

  // Thread i: to[i] = from[i] + 1, where from is loaded as read-only data.
  error_t (*add_one_readonly)(stream_t, int* to, const int* from, int count);
  // The same in one thread, which writes to[i] before it loads from[i + 1].
  error_t (*shift_readonly)(stream_t, int* to, const int* from, int count);
};
SIMT_DECLARE_IN_VARIANTS(extern const PromiseKernels promise_kernels;)

}  // namespace lockstep
