#include "cuda_backend/device/protocol.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/check.h"

namespace lockstep::cuda {
namespace {

constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15ull;
constexpr std::uint32_t kPartState = 16;

std::uint64_t coordinate(std::int32_t layer, std::uint32_t part, std::uint32_t head) {
  return mix((std::uint64_t{static_cast<std::uint32_t>(layer)} << 32) | (part << 16) | head);
}

// Word i of some bytes; the last one is filled with zero bytes.
std::uint64_t word_at(std::span<const std::byte> bytes, std::size_t i) {
  std::uint64_t word = 0;
  std::memcpy(&word, bytes.data() + 8 * i, std::min<std::size_t>(8, bytes.size() - 8 * i));
  return word;
}
void put_word(std::span<std::byte> bytes, std::size_t i, std::uint64_t word) {
  std::memcpy(bytes.data() + 8 * i, &word, std::min<std::size_t>(8, bytes.size() - 8 * i));
}
std::size_t words_of(std::size_t size_bytes) { return (size_bytes + 7) / 8; }

}  // namespace

ShapeMasks shape_masks(DType dtype) {
  switch (dtype) {
    case DType::bf16:
      return {0x807F807F807F807Full, 0x3F003F003F003F00ull};
    case DType::fp16:
      return {0x83FF83FF83FF83FFull, 0x3800380038003800ull};
    case DType::fp32:
      return {0x807FFFFF807FFFFFull, 0x3F0000003F000000ull};
    case DType::fp8_e4m3:
      return {0x8787878787878787ull, 0x3030303030303030ull};
    case DType::fp8_e5m2:
      return {0x8383838383838383ull, 0x3838383838383838ull};
    case DType::int8:
    case DType::uint8:
      return {~0ull, 0};
  }
  LS_CHECK(false, "dtype {}", static_cast<int>(dtype));
  return {};
}

std::uint64_t mix(std::uint64_t x) {
  x += kGolden;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

void fill_row(std::uint64_t content, std::int32_t layer, std::uint32_t part, std::uint32_t head,
              DType dtype, std::span<std::byte> row) {
  const std::uint64_t key = mix(content ^ coordinate(layer, part, head));
  const ShapeMasks masks = shape_masks(dtype);
  for (std::size_t i = 0; i < words_of(row.size()); ++i)
    put_word(row, i, (mix(key + (i + 1) * kGolden) & masks.keep) | masks.set);
}

void advance_state(std::span<const std::uint64_t> contents, std::int32_t layer, std::int32_t index,
                   std::int32_t part, std::span<std::byte> state) {
  const std::uint64_t place = coordinate(layer, kPartState + static_cast<std::uint32_t>(index),
                                         static_cast<std::uint32_t>(part));
  for (std::size_t i = 0; i < words_of(state.size()); ++i) {
    std::uint64_t word = word_at(state, i);
    for (const std::uint64_t content : contents)
      word = word * 0xD1342543DE82EF95ull + mix(content ^ place ^ i);
    put_word(state, i, word);
  }
}

PageSums page_sums(std::span<const std::byte> page) {
  PageSums sums;
  for (std::size_t i = 0; i < words_of(page.size()); ++i) {
    const std::uint64_t w = word_at(page, i), k = mix(2 * i), m = mix(2 * i + 1);
    const auto low = [](std::uint64_t x) { return static_cast<std::uint32_t>(x); };
    const auto high = [](std::uint64_t x) { return static_cast<std::uint32_t>(x >> 32); };
    const std::uint32_t k_low = low(w) + low(k), k_high = high(w) + high(k);
    const std::uint32_t m_low = low(w) + low(m), m_high = high(w) + high(m);
    sums.a += std::uint64_t{k_low} * k_high + w;
    sums.b += std::uint64_t{m_low} * m_high + std::rotl(w, 32);
  }
  return sums;
}

std::uint64_t row_digest(std::span<const std::byte> row, std::int64_t position, std::uint32_t part,
                         std::uint32_t head) {
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < words_of(row.size()); ++i)
    sum += mix(word_at(row, i) ^ (i + 1) * kGolden);
  return mix(sum ^ mix((static_cast<std::uint64_t>(position) << 16) | (part << 15) | head));
}

void fill_poison(std::uint64_t kind, std::int32_t tensor, std::int64_t page, std::int64_t first,
                 std::span<std::byte> bytes) {
  const std::uint64_t key =
      mix(0x706F69736F6E0000ull + kind) ^
      mix(static_cast<std::uint64_t>(tensor) << 32 | static_cast<std::uint64_t>(page));
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    const std::uint64_t at = static_cast<std::uint64_t>(first) + i;
    bytes[i] = static_cast<std::byte>((key ^ (at / 8)) >> (8 * (at % 8)));
  }
}

}  // namespace lockstep::cuda
