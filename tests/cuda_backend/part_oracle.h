// The addresses of a paged cache's elements, from the shapes of engines' caches, and the rounding
// of numbers by a search of all numbers of the format. Plain loops: no code and no arithmetic of
// cuda_backend/.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda_backend/kernels/engine_params.h"
#include "tests/cuda_backend/protocol_oracle.h"

namespace lockstep::oracle {

enum class Arrangement { nhd, hnd, x_split_key, x_split_value };

// One part of a layer in pages of page_bytes, beginning at byte `offset`. Rows are row_bytes apart
// where they are whole: more than their elements if a scale or another part follows them.
struct Part {
  Arrangement arrangement = Arrangement::nhd;
  DType dtype = DType::bf16;
  cuda::Scaling scaling = cuda::Scaling::none;
  int num_heads = 1;
  int head_size = 64;
  int block_size = 16;
  std::int64_t page_bytes = 0;
  std::int64_t offset = 0;
  int row_bytes = 0;     // 0: as many as the elements need
  int head_bytes = 0;    // NHD: between the heads of a token; 0: row_bytes
  int scale_offset = 0;  // per_token_head: of head 0's scale in a token's row
  int scale_stride = 0;  // between the scales of two heads

  int row() const { return row_bytes != 0 ? row_bytes : head_size * itemsize(dtype); }
  int x() const { return 16 / itemsize(dtype); }
  std::int64_t bytes_of_block() const { return std::int64_t{block_size} * num_heads * row(); }

  std::int64_t element_at(std::int64_t block, int token, int head, int e) const {
    const std::int64_t item = itemsize(dtype);
    std::int64_t at = 0;
    switch (arrangement) {
      case Arrangement::nhd:
        at = head_bytes != 0 ? std::int64_t{token} * row() + head * head_bytes + e * item
                             : (std::int64_t{token} * num_heads + head) * row() + e * item;
        break;
      case Arrangement::hnd:
        at = (std::int64_t{head} * block_size + token) * row() + e * item;
        break;
      case Arrangement::x_split_key:
        at = (((std::int64_t{head} * (head_size / x()) + e / x()) * block_size + token) * x() +
              e % x()) *
             item;
        break;
      case Arrangement::x_split_value:
        at = ((std::int64_t{head} * head_size + e) * block_size + token) * item;
        break;
    }
    return block * page_bytes + offset + at;
  }
  std::int64_t scale_at(std::int64_t block, int token, int head) const {
    if (scale_stride != 0)
      return element_at(block, token, 0, 0) + scale_offset + std::int64_t{head} * scale_stride;
    return element_at(block, token, head, 0) + scale_offset;
  }

  // The same addresses as the strides that a kernel receives.
  cuda::PartLayout layout(std::byte* memory, float* tensor_scale) const {
    cuda::PartLayout part;
    const std::int64_t origin = element_at(0, 0, 0, 0);
    part.base = memory + origin;
    part.block_stride = element_at(1, 0, 0, 0) - origin;
    part.token_stride = element_at(0, 1, 0, 0) - origin;
    part.head_stride = element_at(0, 0, 1, 0) - origin;
    part.block_size = cuda::make_divisor(static_cast<std::uint32_t>(block_size));
    part.num_heads = num_heads;
    part.head_size = part.piece_elements = head_size;
    if (arrangement == Arrangement::x_split_key) part.piece_elements = x();
    if (arrangement == Arrangement::x_split_value) part.piece_elements = 1;
    part.piece_stride = element_at(0, 0, 0, part.piece_elements) - origin;
    part.dtype = dtype;
    part.scaling = scaling;
    if (scaling == cuda::Scaling::per_tensor)
      part.scales = reinterpret_cast<std::byte*>(tensor_scale);
    if (scaling == cuda::Scaling::per_token_head) {
      const std::int64_t first = scale_at(0, 0, 0);
      part.scales = memory + first;
      part.scale_block_stride = scale_at(1, 0, 0) - first;
      part.scale_token_stride = scale_at(0, 1, 0) - first;
      part.scale_head_stride = scale_at(0, 0, 1) - first;
    }
    return part;
  }
};

inline void put_bits(std::uint8_t* at, std::uint32_t bits, int bytes) {
  for (int k = 0; k < bytes; ++k) at[k] = static_cast<std::uint8_t>(bits >> (8 * k));
}
inline double number_of(std::uint32_t bits, DType dtype) {
  std::uint8_t bytes[4];
  put_bits(bytes, bits, 4);
  return element(bytes, dtype);
}

// Rounding to nearest, ties to the even pattern: the two neighbours of the number are looked up
// among the patterns of the format, which grow with the number that they stand for.
inline std::uint32_t nearest_float(double value, DType dtype) {
  const std::uint32_t sign_bit = itemsize(dtype) == 2 ? 0x8000 : 0x80;
  const std::uint32_t largest = dtype == DType::bf16       ? 0x7F7F
                                : dtype == DType::fp16     ? 0x7BFF
                                : dtype == DType::fp8_e5m2 ? 0x7B
                                                           : 0x7E;
  const bool saturates = itemsize(dtype) == 1;
  const double size = std::fabs(value);
  std::uint32_t low = 0, high = largest + 1;  // number_of(low) <= size < number_of(high)
  while (high - low > 1) {
    const std::uint32_t middle = (low + high) / 2;
    (number_of(middle, dtype) <= size ? low : high) = middle;
  }
  if (low == largest) {
    const double step = number_of(largest, dtype) - number_of(largest - 1, dtype);
    if (!saturates && size >= number_of(largest, dtype) + step / 2) ++low;  // infinity
  } else {
    const double half_way = (number_of(low, dtype) + number_of(low + 1, dtype)) / 2;
    if (size > half_way || (size == half_way && low % 2 == 1)) ++low;
  }
  return low | (std::signbit(value) ? sign_bit : 0);
}

// int8 as vLLM rounds it: a sum with one half in fp32, cut off.
inline std::uint32_t nearest_int8(float value) {
  const double away = static_cast<float>(double{value} + (value >= 0 ? 0.5 : -0.5));
  return static_cast<std::uint32_t>(static_cast<int>(std::fmin(127, std::fmax(-128, away)))) & 0xFF;
}
inline std::uint32_t rounded(float value, DType dtype) {
  if (dtype == DType::fp32) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
  }
  return dtype == DType::int8 ? nearest_int8(value) : nearest_float(value, dtype);
}

}  // namespace lockstep::oracle
