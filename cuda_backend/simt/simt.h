// The one header that kernel files include: CUDA C++ that nvcc compiles for a GPU, g++ for the CPU.
//
// Under nvcc it is a thin layer over cuda_runtime.h. Under g++ every CUDA thread is a fiber of a
// deterministic scheduler (executor.h), and the memory of the device is a sparse arena (arena.h).
//
// The pattern. A kernel file holds __global__ functions and their launchers, all of it inside
// namespace SIMT_VARIANT, and a table of the launchers. A header declares the table once per
// variant (SIMT_DECLARE_IN_VARIANTS). lockstep_simt_kernels (cmake/lockstep_simt.cmake) makes two
// objects from each file. tests/cuda_backend/simt_pattern_test.cpp is an example, complete.
//
// Host code picks `simt_fast::scale_kernels` or `simt_checked::scale_kernels` at run time and calls
// launchers through the table. The checked objects are compiled with -fsanitize=thread, whose hooks
// are ours (tsan_hooks.cpp): every load and store of the unmodified kernel is checked. The variant
// namespace keeps the linker from merging the two compilations of one template.
//
// Rules for kernel files
//  1. Shared memory is SIMT_SHARED_ARRAY(T, name, N) or SIMT_DYNAMIC_SHARED(T, name).
//  2. Launch with simt::launch; kernel parameters are trivially copyable and never references.
//  3. Move 16 bytes as simt::vec16. Copy memory that may be undefined with simt::copy16 or
//     copy_value, read it with load_any: any other load of undefined memory is reported.
//     `__restrict__` is not used: nothing checks its promise.
//  4. memcpy and memset are for registers. The checked variant checks them anyway: to device memory
//     memcpy is a copy_value, from device memory into a local it is a load.
//  5. A kernel defines no objects with destructors: a faulting thread is abandoned, not unwound.
//  6. No spin-waiting on another CTA: outside of mode hunt, the CPU runs the CTAs of a launch one
//     after the other.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define SIMT_ON_GPU 1
#ifndef SIMT_VARIANT
#define SIMT_VARIANT simt_cuda
#endif
#define SIMT_DECLARE_IN_VARIANTS(...) \
  namespace simt_cuda {               \
  __VA_ARGS__                         \
  }
#include "cuda_backend/simt/simt_gpu.h"
#else
#define SIMT_ON_GPU 0
#ifndef SIMT_VARIANT
#define SIMT_VARIANT simt_host  // host code that includes this header for its types
#endif
#define SIMT_DECLARE_IN_VARIANTS(...) \
  namespace simt_fast {               \
  __VA_ARGS__                         \
  }                                   \
  namespace simt_checked {            \
  __VA_ARGS__                         \
  }
#include "cuda_backend/simt/simt_cpu.h"
#endif
