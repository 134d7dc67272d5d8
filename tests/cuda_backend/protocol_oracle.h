// The protocol of sim/protocol/backend.h in plain loops over bytes, for comparison with the
// kernels' results. It shares no code and no arithmetic with cuda_backend/ or reference/.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "reference/types/kv_cache_spec.h"

namespace lockstep::oracle {

using Bytes = std::vector<std::uint8_t>;

inline std::uint64_t mix(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x ^= x >> 30;
  x *= 0xBF58476D1CE4E5B9u;
  x ^= x >> 27;
  x *= 0x94D049BB133111EBu;
  x ^= x >> 31;
  return x;
}

inline std::uint64_t coordinate(int layer, int part, int head) {
  return mix(std::uint64_t(layer) * 4294967296u + std::uint64_t(part) * 65536u +
             std::uint64_t(head));
}

inline std::uint8_t byte_of(std::uint64_t word, std::size_t i) {
  return static_cast<std::uint8_t>(word >> (8 * i));
}
// Word i of some bytes, the last one filled with zero bytes.
inline std::uint64_t word_at(const std::uint8_t* bytes, std::size_t size, std::size_t i) {
  std::uint64_t word = 0;
  for (std::size_t k = 0; k < 8 && 8 * i + k < size; ++k)
    word += std::uint64_t{bytes[8 * i + k]} << (8 * k);
  return word;
}

inline int itemsize(DType dtype) {
  if (dtype == DType::fp32) return 4;
  return dtype == DType::bf16 || dtype == DType::fp16 ? 2 : 1;
}

// Sets sign and mantissa free and the exponent fixed, element by element.
inline void shape_element(std::uint8_t* e, DType dtype) {
  switch (dtype) {
    case DType::bf16:
      e[1] = (e[1] & 0x80) | 0x3F;
      e[0] = e[0] & 0x7F;
      break;
    case DType::fp16:
      e[1] = (e[1] & 0x83) | 0x38;
      break;
    case DType::fp32:
      e[3] = (e[3] & 0x80) | 0x3F;
      e[2] = e[2] & 0x7F;
      break;
    case DType::fp8_e4m3:
      e[0] = (e[0] & 0x87) | 0x30;
      break;
    case DType::fp8_e5m2:
      e[0] = (e[0] & 0x83) | 0x38;
      break;
    default:
      break;
  }
}

// Rule (1): the row of one token, part and head.
inline Bytes row(std::uint64_t content, int layer, int part, int head, int head_size, DType dtype) {
  const std::uint64_t key = mix(content ^ coordinate(layer, part, head));
  Bytes bytes(static_cast<std::size_t>(head_size * itemsize(dtype)));
  for (std::size_t i = 0; i < bytes.size(); ++i)
    bytes[i] = byte_of(mix(key + (i / 8 + 1) * 0x9E3779B97F4A7C15u), i % 8);
  for (int e = 0; e < head_size; ++e) shape_element(bytes.data() + e * itemsize(dtype), dtype);
  return bytes;
}

// Rule (2): a state tensor of `size` bytes after these contents, starting from `before` (or zeros).
inline Bytes state(Bytes before, const std::vector<std::uint64_t>& contents, int layer,
                   int tensor) {
  for (std::size_t i = 0; 8 * i < before.size(); ++i) {
    std::uint64_t word = word_at(before.data(), before.size(), i);
    for (std::uint64_t content : contents)
      word = word * 0xD1342543DE82EF95u + mix(content ^ coordinate(layer, 16 + tensor, 0) ^ i);
    for (std::size_t k = 0; k < 8 && 8 * i + k < before.size(); ++k)
      before[8 * i + k] = byte_of(word, k);
  }
  return before;
}

// Rule (3).
inline std::pair<std::uint64_t, std::uint64_t> fingerprint(const std::uint8_t* page,
                                                           std::size_t size) {
  std::uint64_t a = 0, b = 0;
  for (std::size_t i = 0; 8 * i < size; ++i) {
    const std::uint64_t w = word_at(page, size, i), k = mix(2 * i), m = mix(2 * i + 1);
    const std::uint64_t low = w % 4294967296u, high = w / 4294967296u;
    const auto product = [&](std::uint64_t key) {
      return ((low + key % 4294967296u) % 4294967296u) * ((high + key / 4294967296u) % 4294967296u);
    };
    a += product(k) + w;
    b += product(m) + low * 4294967296u + high;
  }
  return {a, b};
}

// Rule (4): what one row adds to a digest.
inline std::uint64_t digest_of_row(const Bytes& bytes, int position, int part, int head) {
  std::uint64_t r = 0;
  for (std::size_t i = 0; 8 * i < bytes.size(); ++i)
    r += mix(word_at(bytes.data(), bytes.size(), i) ^ (i + 1) * 0x9E3779B97F4A7C15u);
  const std::uint64_t place =
      std::uint64_t(position) * 65536u + std::uint64_t(part) * 32768u + std::uint64_t(head);
  return mix(r ^ mix(place));
}

// Rule (6): byte `at` of a page.
inline std::uint8_t poison_byte(int kind, int tensor, std::int64_t page, std::int64_t at) {
  const std::uint64_t word = mix(0x706F69736F6E0000u + std::uint64_t(kind)) ^
                             mix(std::uint64_t(tensor) * 4294967296u + std::uint64_t(page)) ^
                             std::uint64_t(at / 8);
  return byte_of(word, static_cast<std::size_t>(at % 8));
}

// An element as a number, by the definition of its format.
inline double element(const std::uint8_t* e, DType dtype) {
  const auto number = [](int sign, int exponent, int mantissa, int bias, int bits) {
    const double magnitude =
        exponent == 0 ? std::ldexp(double(mantissa), 1 - bias - bits)
                      : std::ldexp(1.0 + std::ldexp(double(mantissa), -bits), exponent - bias);
    return sign ? -magnitude : magnitude;
  };
  switch (dtype) {
    case DType::bf16:
      return number(e[1] >> 7, (e[1] & 0x7F) * 2 + (e[0] >> 7), e[0] & 0x7F, 127, 7);
    case DType::fp16:
      return number(e[1] >> 7, (e[1] >> 2) & 0x1F, (e[1] & 3) * 256 + e[0], 15, 10);
    case DType::fp32: {
      float value;
      std::memcpy(&value, e, 4);
      return value;
    }
    case DType::fp8_e4m3:
      return number(e[0] >> 7, (e[0] >> 3) & 0xF, e[0] & 7, 7, 3);
    case DType::fp8_e5m2:
      return number(e[0] >> 7, (e[0] >> 2) & 0x1F, e[0] & 3, 15, 2);
    case DType::int8:
      return static_cast<std::int8_t>(e[0]);
    default:
      return e[0];
  }
}

// Rule (5) for one query head: keys and values as rows of bytes.
inline std::vector<double> attention(const std::vector<double>& query,
                                     const std::vector<Bytes>& keys,
                                     const std::vector<Bytes>& values, DType dtype) {
  const std::size_t head_size = query.size();
  std::vector<double> scores, output(head_size, 0.0);
  double highest = -INFINITY, total = 0.0;
  for (const Bytes& key : keys) {
    double score = 0.0;
    for (std::size_t d = 0; d < head_size; ++d)
      score += query[d] * element(key.data() + d * itemsize(dtype), dtype);
    scores.push_back(score / std::sqrt(double(head_size)));
    highest = std::max(highest, scores.back());
  }
  for (double& score : scores) total += score = std::exp(score - highest);
  for (std::size_t j = 0; j < values.size(); ++j)
    for (std::size_t d = 0; d < head_size; ++d)
      output[d] += scores[j] / total * element(values[j].data() + d * itemsize(dtype), dtype);
  return output;
}

}  // namespace lockstep::oracle
