// Numbers in a cache: where an element of a row lies, its bit pattern read and rounded by the
// definition of each format, and the exponential that attention weighs rows with. In integer
// arithmetic or from fmaf alone, so that a CPU and a GPU agree in every bit (with contraction off
// on both). A GPU rounds by its own instructions, which have the same rules.
//
// 1. fp16, bf16, e4m3 and e5m2 round to nearest, ties to even, subnormals included.
// 2. e4m3 and e5m2 saturate to their largest finite number; fp16 and bf16 overflow to infinity.
// 3. int8 rounds as vLLM's per-token-head cache write does: half away from zero, by an fp32 sum
//    with 0.5 that is then cut off, between -128 and 127.
// 4. NaN becomes the NaN whose magnitude is all ones, without a sign; int8 makes 0 of it.
#pragma once

#include "cuda_backend/kernels/engine_params.h"
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

__device__ __forceinline__ std::int32_t element_bytes(DType dtype) {
  return dtype == DType::fp32 ? 4 : dtype == DType::bf16 || dtype == DType::fp16 ? 2 : 1;
}

__device__ __forceinline__ float decode(std::uint32_t bits, DType dtype) {
  switch (element_bytes(dtype)) {
    case 4:
      return element<4>(bits, 0, dtype);
    case 2:
      return element<2>(bits, 0, dtype);
    default:
      return element<1>(bits, 0, dtype);
  }
}

template <int kExponentBits, int kMantissaBits, bool kInfinities, bool kSaturates>
__device__ __forceinline__ std::uint32_t round_to(float value) {
  constexpr int kBias = (1 << (kExponentBits - 1)) - 1, kDropped = 23 - kMantissaBits;
  constexpr std::uint32_t kTop = (1u << kExponentBits) - 1;
  constexpr std::uint32_t kAllOnes = (1u << (kExponentBits + kMantissaBits)) - 1;
  constexpr std::uint32_t kInfinity = kTop << kMantissaBits;
  constexpr std::uint32_t kLargest = kInfinities ? kInfinity - 1 : kAllOnes - 1;
  const std::uint32_t bits = __float_as_uint(value), magnitude = bits & 0x7FFFFFFFu;
  const std::uint32_t sign = (bits >> 31) << (kExponentBits + kMantissaBits);
  if (magnitude > 0x7F800000u) return kAllOnes;
  std::uint32_t rounded;
  if (magnitude < std::uint32_t(127 - kBias + 1) << 23) {
    // Below the smallest normal number: a whole number of the smallest subnormals. bf16 has fp32's
    // own exponents, and its scale, which has none, in two steps.
    constexpr int kScale = kBias - 1 + kMantissaBits;
    float units = __uint_as_float(magnitude);
    if constexpr (kScale > 127) units *= __uint_as_float(std::uint32_t(127 + kScale - 127) << 23);
    units *= __uint_as_float(std::uint32_t(127 + (kScale > 127 ? 127 : kScale)) << 23);
    rounded = std::uint32_t(rintf(units));
  } else {
    const std::uint32_t even = (magnitude >> kDropped) & 1;
    rounded = (magnitude + (1u << (kDropped - 1)) - 1 + even) >> kDropped;
    rounded -= std::uint32_t(127 - kBias) << kMantissaBits;
  }
  if (rounded > kLargest) rounded = kSaturates ? kLargest : kInfinity;
  return sign | rounded;
}

#if SIMT_ON_GPU && defined(__CUDA_ARCH__)
__device__ __forceinline__ std::uint32_t to_bf16(float value) {
  std::uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
__device__ __forceinline__ std::uint32_t to_fp16(float value) {
  std::uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
#else
__device__ __forceinline__ std::uint32_t to_bf16(float value) {
  return round_to<8, 7, true, false>(value);
}
__device__ __forceinline__ std::uint32_t to_fp16(float value) {
  return round_to<5, 10, true, false>(value);
}
#endif
#if SIMT_ON_GPU && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
__device__ __forceinline__ std::uint32_t to_e4m3(float value) {
  std::uint16_t bits;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(0.0f), "f"(value));
  return bits;
}
__device__ __forceinline__ std::uint32_t to_e5m2(float value) {
  std::uint16_t bits;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(0.0f), "f"(value));
  return bits;
}
#else
__device__ __forceinline__ std::uint32_t to_e4m3(float value) {
  return round_to<4, 3, false, true>(value);
}
__device__ __forceinline__ std::uint32_t to_e5m2(float value) {
  return round_to<5, 2, true, true>(value);
}
#endif

__device__ __forceinline__ std::uint32_t encode(float value, DType dtype) {
  switch (dtype) {
    case DType::fp32:
      return __float_as_uint(value);
    case DType::bf16:
      return to_bf16(value);
    case DType::fp16:
      return to_fp16(value);
    case DType::fp8_e4m3:
      return to_e4m3(value);
    case DType::fp8_e5m2:
      return to_e5m2(value);
    default: {
      const float away = value >= 0.0f ? value + 0.5f : value - 0.5f;
      const float kept = away > 127.0f ? 127.0f : away < -128.0f ? -128.0f : away;
      return kept == kept ? std::uint32_t(std::int32_t(kept)) & 0xFF : 0;
    }
  }
}

// The largest number of a quantised format: what per-token-head scales map a row's largest to.
__device__ __forceinline__ float largest_number(DType dtype) {
  return dtype == DType::fp8_e4m3 ? 448.0f : dtype == DType::fp8_e5m2 ? 57344.0f : 127.0f;
}

// e2m1, four bits: NaN becomes 6.
__device__ __forceinline__ std::uint32_t encode_e2m1(float value) {
  const std::uint32_t bits = __float_as_uint(value), magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return 7;
  std::uint32_t rounded;
  if (magnitude < 0x3F800000u) {  // below 1: whole halves
    rounded = std::uint32_t(rintf(2.0f * __uint_as_float(magnitude)));
  } else {
    const std::uint32_t even = (magnitude >> 22) & 1;
    rounded = ((magnitude + 0x1FFFFFu + even) >> 22) - (126u << 1);
  }
  return bits >> 31 << 3 | (rounded < 7 ? rounded : 7);
}
__device__ __forceinline__ float decode_e2m1(std::uint32_t bits) {
  const float scaled = __uint_as_float((bits & 8) << 28 | (bits & 7) << 22);
  return scaled * __uint_as_float(253u << 23);
}

// A format that a kernel is compiled for, or any: that of its parameters.
inline constexpr int kAny = -1;
template <int kFormat>
__device__ __forceinline__ constexpr DType format_of([[maybe_unused]] DType dtype) {
  if constexpr (kFormat == kAny)
    return dtype;
  else
    return DType(kFormat);
}

// kItem (8 or 1) contiguous elements of `bytes` each. Eight of them are aligned to their size or to
// 16 bytes, whichever is less.
template <int kItem>
__device__ __forceinline__ void load_bits(std::uint32_t (&bits)[kItem], const std::byte* at,
                                          std::int32_t bytes) {
  if constexpr (kItem == 1) {
    bits[0] = std::uint32_t(load_word(at, bytes, bytes));
  } else if (bytes == 4) {
    SIMT_UNROLL
    for (int half = 0; half < 2; ++half) {
      const simt::vec16 vector = reinterpret_cast<const simt::vec16*>(at)[half];
      SIMT_UNROLL
      for (int i = 0; i < 4; ++i) bits[4 * half + i] = simt::word(vector, i);
    }
  } else if (bytes == 2) {
    const simt::vec16 vector = *reinterpret_cast<const simt::vec16*>(at);
    SIMT_UNROLL
    for (int i = 0; i < 8; ++i) bits[i] = simt::word(vector, i / 2) >> (16 * (i % 2)) & 0xFFFF;
  } else {
    const std::uint64_t word = *reinterpret_cast<const std::uint64_t*>(at);
    SIMT_UNROLL
    for (int i = 0; i < 8; ++i) bits[i] = std::uint32_t(word >> (8 * i)) & 0xFF;
  }
}

template <int kItem>
__device__ __forceinline__ void store_bits(std::byte* at, const std::uint32_t (&bits)[kItem],
                                           std::int32_t bytes) {
  if constexpr (kItem == 1) {
    store_word(at, bits[0], bytes, bytes);
  } else if (bytes == 4) {
    SIMT_UNROLL
    for (int half = 0; half < 2; ++half)
      reinterpret_cast<simt::vec16*>(at)[half] = simt::make_vec16(
          bits[4 * half], bits[4 * half + 1], bits[4 * half + 2], bits[4 * half + 3]);
  } else if (bytes == 2) {
    *reinterpret_cast<simt::vec16*>(at) =
        simt::make_vec16(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16, bits[4] | bits[5] << 16,
                         bits[6] | bits[7] << 16);
  } else {
    std::uint64_t word = 0;
    SIMT_UNROLL
    for (int i = 0; i < 8; ++i) word |= std::uint64_t(bits[i]) << (8 * i);
    *reinterpret_cast<std::uint64_t*>(at) = word;
  }
}

// One number, whatever its format.
__device__ __forceinline__ float load_number(const std::byte* at, DType dtype) {
  const std::int32_t bytes = element_bytes(dtype);
  return decode(std::uint32_t(load_word(at, bytes, bytes)), dtype);
}
__device__ __forceinline__ void store_number(std::byte* at, float value, DType dtype) {
  const std::int32_t bytes = element_bytes(dtype);
  store_word(at, encode(value, dtype), bytes, bytes);
}

// Numbers [first, first + kItem) of a row. kBf16: of bf16, aligned to their size or to 16 bytes;
// else of any format.
template <int kItem, bool kBf16>
__device__ __forceinline__ void load_numbers(float (&values)[kItem], const std::byte* row,
                                             std::int32_t first, DType dtype) {
  if constexpr (!kBf16) {
    const std::int64_t bytes = element_bytes(dtype);
    SIMT_UNROLL
    for (int i = 0; i < kItem; ++i) values[i] = load_number(row + (first + i) * bytes, dtype);
  } else if constexpr (kItem >= 8) {
    SIMT_UNROLL
    for (int at = 0; at < kItem; at += 8) {
      std::uint32_t bits[8];
      load_bits<8>(bits, row + 2 * std::int64_t(first + at), 2);
      SIMT_UNROLL
      for (int i = 0; i < 8; ++i) values[at + i] = __uint_as_float(bits[i] << 16);
    }
  } else {
    const std::uint64_t word = load_word(row + 2 * std::int64_t(first), 2 * kItem, 2 * kItem);
    SIMT_UNROLL
    for (int i = 0; i < kItem; ++i)
      values[i] = __uint_as_float(std::uint32_t(word >> (16 * i)) << 16);
  }
}

// The nonlinear functions of state layers, from fmaf, products and one quotient, so that a CPU and
// a GPU agree in every bit. Each is within 8 ulp of the exact value.

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

// Addresses in a PartLayout: a row by block, token and head, an element by its number, a scale.
__device__ __forceinline__ std::byte* part_row(const PartLayout& part, std::int64_t block,
                                               std::int64_t offset, std::int64_t head) {
  return part.base + block * part.block_stride + offset * part.token_stride +
         head * part.head_stride;
}

// Element `index` of a row; the elements up to the end of its piece follow it.
__device__ __forceinline__ std::byte* part_element(const PartLayout& part, std::byte* row,
                                                   std::int32_t index) {
  if (part.piece_elements >= part.head_size)
    return row + std::int64_t(index) * element_bytes(part.dtype);
  const std::int32_t piece = index / part.piece_elements;
  return row + piece * part.piece_stride +
         std::int64_t(index - piece * part.piece_elements) * element_bytes(part.dtype);
}

__device__ __forceinline__ float* part_scale(const PartLayout& part, std::int64_t block,
                                             std::int64_t offset, std::int64_t head) {
  return reinterpret_cast<float*>(part.scales + block * part.scale_block_stride +
                                  offset * part.scale_token_stride + head * part.scale_head_stride);
}

}  // namespace SIMT_VARIANT
}  // namespace lockstep::cuda
