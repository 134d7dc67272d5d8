// The nonlinear functions of state layers, from fmaf, products and one quotient, so that a CPU and
// a GPU agree in every bit. Each is within 8 ulp of the exact value.
#pragma once

#include "cuda_backend/kernels/elements.cuh"

namespace lockstep::cuda {
namespace SIMT_VARIANT {

// ln(1 + u) for 0 <= u <= 1, as 2 artanh(s) with s = u / (2 + u) <= 1/3.
__device__ __forceinline__ float log_of_one_plus(float u) {
  const float s = u / (2.0f + u), q = s * s;
  float sum = 1.0f / 15.0f;
  sum = fmaf(sum, q, 1.0f / 13.0f);
  sum = fmaf(sum, q, 1.0f / 11.0f);
  sum = fmaf(sum, q, 1.0f / 9.0f);
  sum = fmaf(sum, q, 1.0f / 7.0f);
  sum = fmaf(sum, q, 1.0f / 5.0f);
  sum = fmaf(sum, q, 1.0f / 3.0f);
  sum = fmaf(sum, q, 1.0f);
  return 2.0f * s * sum;
}

__device__ __forceinline__ float softplus(float x) {
  return (x > 0.0f ? x : 0.0f) + log_of_one_plus(exp_nonpositive(-fabsf(x)));
}

__device__ __forceinline__ float sigmoid(float x) {
  const float e = exp_nonpositive(-fabsf(x));
  return (x >= 0.0f ? 1.0f : e) / (1.0f + e);
}

__device__ __forceinline__ float silu(float x) { return x * sigmoid(x); }

}  // namespace SIMT_VARIANT
}  // namespace lockstep::cuda
