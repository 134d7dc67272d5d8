#include "tests/sim/plain_words.h"

#include <algorithm>
#include <cstring>

namespace lockstep::plain {

namespace {

// Rule (1), element by element.
u64 shaped(u64 word, DType dtype) {
  const auto each = [&](int bits, u64 keep, u64 set) {
    u64 out = 0;
    for (int at = 0; at < 64; at += bits) {
      const u64 lane = (word >> at) & (~u64{0} >> (64 - bits));
      out |= ((lane & keep) | set) << at;
    }
    return out;
  };
  switch (dtype) {
    case DType::bf16:
      return each(16, 0x807F, 0x3F00);
    case DType::fp16:
      return each(16, 0x83FF, 0x3800);
    case DType::fp32:
      return each(32, 0x807FFFFF, 0x3F000000);
    case DType::fp8_e4m3:
      return each(8, 0x87, 0x30);
    case DType::fp8_e5m2:
      return each(8, 0x83, 0x38);
    default:
      return word;
  }
}

}  // namespace

u64 mix64(u64 x) {
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

u64 coordinate_of(u64 layer, u64 part, u64 head) {
  return mix64((layer << 32) | (part << 16) | head);
}

u64 content_word(u64 content, u64 layer, u64 part, u64 head, u64 i, DType dtype) {
  const u64 key = mix64(content ^ coordinate_of(layer, part, head));
  return shaped(mix64(key + (i + 1) * 0x9E3779B97F4A7C15ull), dtype);
}

u64 word_at(const std::uint8_t* bytes, std::int64_t size, std::int64_t i) {
  u64 word = 0;
  std::memcpy(&word, bytes + 8 * i,
              static_cast<std::size_t>(std::min<std::int64_t>(8, size - 8 * i)));
  return word;
}
void put_word(std::uint8_t* bytes, std::int64_t size, std::int64_t i, u64 word) {
  std::memcpy(bytes + 8 * i, &word,
              static_cast<std::size_t>(std::min<std::int64_t>(8, size - 8 * i)));
}

}  // namespace lockstep::plain
