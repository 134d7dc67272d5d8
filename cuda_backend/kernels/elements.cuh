// Elements of a cache as fp32 numbers, and the exponential that attention weighs them with. Exact
// or built from fmaf alone, so that a CPU and a GPU agree in every bit (with contraction off on
// both).
#pragma once

#include "cuda_backend/kernels/words.cuh"

namespace lockstep::cuda {
namespace SIMT_VARIANT {

// A float of 1 sign, kExponentBits and kMantissaBits bits with the usual bias. kInfinities: the
// highest exponent means infinity or NaN (fp16, e5m2); without, only the all-ones pattern is NaN
// (e4m3fn).
template <int kExponentBits, int kMantissaBits, bool kInfinities>
__device__ __forceinline__ float narrow_float(std::uint32_t bits) {
  constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  constexpr std::uint32_t kMagnitude = (1u << (kExponentBits + kMantissaBits)) - 1;
  constexpr std::uint32_t kTop = ((1u << kExponentBits) - 1) << kMantissaBits;
  const std::uint32_t sign = (bits >> (kExponentBits + kMantissaBits)) << 31;
  const std::uint32_t magnitude = bits & kMagnitude;
  if (kInfinities ? magnitude >= kTop : magnitude == kMagnitude)
    return __uint_as_float(sign | 0x7F800000u |
                           (magnitude & ((1u << kMantissaBits) - 1)) << (23 - kMantissaBits));
  // As an fp32 with its own exponent, which is off by the difference of the biases; exact for
  // subnormals.
  const float scaled = __uint_as_float(sign | magnitude << (23 - kMantissaBits));
  return scaled * __uint_as_float(std::uint32_t(127 + 127 - kBias) << 23);
}

// Element k of a word that holds 8 / kElementBytes of them.
template <int kElementBytes>
__device__ __forceinline__ float element(std::uint64_t word, int k, DType dtype) {
  const auto bits = std::uint32_t(word >> (8 * kElementBytes * k));
  if constexpr (kElementBytes == 4) return __uint_as_float(bits);
  if constexpr (kElementBytes == 2)
    return dtype == DType::bf16 ? __uint_as_float(bits << 16)
                                : narrow_float<5, 10, true>(bits & 0xFFFF);
  if constexpr (kElementBytes == 1) {
    if (dtype == DType::fp8_e4m3) return narrow_float<4, 3, false>(bits & 0xFF);
    if (dtype == DType::fp8_e5m2) return narrow_float<5, 2, true>(bits & 0xFF);
    return dtype == DType::int8 ? float(std::int8_t(bits & 0xFF)) : float(bits & 0xFF);
  }
}

// e^x for x <= 0, within 2 ulp; 0 below -87.
__device__ __forceinline__ float exp_nonpositive(float x) {
  if (!(x > -87.0f)) return x != x ? x : 0.0f;
  const float n = floorf(fmaf(x, 1.44269504f, 0.5f));
  // x - n * ln 2, with ln 2 = 0.693359375 - 2.12194440e-4, the first product exact
  const float r = fmaf(n, 2.12194440e-4f, fmaf(n, -0.693359375f, x));
  float e = 1.98412698e-4f;  // 1/7!, then down to 1/1!
  e = fmaf(e, r, 1.38888889e-3f);
  e = fmaf(e, r, 8.33333333e-3f);
  e = fmaf(e, r, 4.16666667e-2f);
  e = fmaf(e, r, 1.66666667e-1f);
  e = fmaf(e, r, 0.5f);
  e = fmaf(e, r, 1.0f);
  e = fmaf(e, r, 1.0f);
  return e * __uint_as_float(std::uint32_t(std::int32_t(n) + 127) << 23);
}

}  // namespace SIMT_VARIANT
}  // namespace lockstep::cuda
