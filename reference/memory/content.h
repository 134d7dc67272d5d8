// The meaning of the bytes of a cache: the rules of sim/protocol/backend.h as the model computes
// them, word by word. Content ids are functions of the token prefix only (salts and extra keys
// change which blocks may be shared, never what a layer computes), so equal prefixes give equal
// bytes wherever they are stored.
//
// (1) Every function is pure and exact in 64 bits; signed arithmetic never wraps.
// (2) A row of n bytes consists of its words in order, little-endian, the last one truncated.
// (3) The backend implements the same rules on its own: this file is not part of cuda_backend.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "reference/memory/numbers.h"
#include "reference/types/kv_cache_spec.h"
#include "reference/types/token_rows.h"

namespace lockstep {

// The content of a token's position: a hash of all tokens up to and including it.
using ContentId = std::uint64_t;

// Odd constants of rules (1) and (2): multiples of an odd number are distinct modulo 2^64.
inline constexpr std::uint64_t kWordStep = 0x9E3779B97F4A7C15ull;
inline constexpr std::uint64_t kStateStep = 0xD1342543DE82EF95ull;

constexpr std::uint64_t mix(std::uint64_t x) { return splitmix64(x); }

// The content of the empty prefix ("Lockstep" in ASCII), and of a prefix with one more token.
inline constexpr ContentId kEmptyPrefix = 0x4C6F636B73746570ull;
constexpr ContentId next_content(ContentId prefix, std::int32_t token) {
  return mix(std::rotl(prefix, 23) ^ mix(static_cast<std::uint32_t>(token)));
}

// Rule (22): the content of row i of the sinks.
constexpr ContentId sink_content(std::int64_t i) {
  return mix(0x73696E6B00000000ull + static_cast<std::uint64_t>(i));
}

// The coordinate of a row. part 0 is K (the only row of MLA and hidden states), 1 is V, 2 is Q.
// State tensor s is part 16 + s of head 0, or of the rank's number if tensor parallelism splits it.
// `layer` counts the layers of the whole plan group by group, `head` those of the whole model, so
// all ranks agree on a row. REQUIRES: part and head fit 16 bits, layer fits 32.
constexpr std::uint64_t coordinate(std::int64_t layer, std::int64_t part, std::int64_t head) {
  return mix(static_cast<std::uint64_t>(layer) << 32 | static_cast<std::uint64_t>(part) << 16 |
             static_cast<std::uint64_t>(head));
}
inline constexpr std::int64_t kPartK = 0;
inline constexpr std::int64_t kPartV = 1;
inline constexpr std::int64_t kPartQ = 2;
inline constexpr std::int64_t kPartState = 16;

// The mapping from random words to elements. The default keeps sign and mantissa of every element
// and sets its exponent, so that it is in +-[0.5, 1).
// - `stored`: a word is eight stored bytes, from as many bf16 elements.
// - `by_largest`: the same, with the numbers that shape_of_row() selects; the row's scale is at
//   byte scale_at, after as many elements.
// - `by_group`: a word below byte scale_at is 16 elements of four bits; each later word holds the
//   scales of 8 such words.
// - `is_int4`: elements also have four bits, as `int4` defines for the whole row, and its scale
//   follows them.
//
// A layer's shape sets at most one of the four. shape_of_row() then sets `stored` from
// `by_largest`.
struct WordShape {
  std::uint64_t keep = ~std::uint64_t{0};
  std::uint64_t set = 0;
  const StoredNumbers* stored = nullptr;
  const StoredNumbers* by_largest = nullptr;  // [kMagnitudes]
  const StoredNumbers* by_group = nullptr;    // [kMagnitudes]
  bool is_int4 = false;
  Int4Row int4 = {};                           // of the current row
  std::uint64_t scale_at = ~std::uint64_t{0};  // a multiple of 4
  constexpr std::uint64_t operator()(std::uint64_t word) const { return (word & keep) | set; }
};
// The masks of rule (1), repeated for every element of a word. int8 and uint8 keep all bits.
constexpr WordShape word_shape(DType dtype) {
  constexpr std::uint64_t every_2 = 0x0001000100010001ull;
  constexpr std::uint64_t every_4 = 0x0000000100000001ull;
  constexpr std::uint64_t every_1 = 0x0101010101010101ull;
  switch (dtype) {
    case DType::bf16:
      return {0x807F * every_2, 0x3F00 * every_2};
    case DType::fp16:
      return {0x83FF * every_2, 0x3800 * every_2};
    case DType::fp32:
      return {0x807FFFFF * every_4, 0x3F000000 * every_4};
    case DType::fp8_e4m3:
      return {0x87 * every_1, 0x30 * every_1};
    case DType::fp8_e5m2:
      return {0x83 * every_1, 0x38 * every_1};
    default:
      return {};
  }
}

// The key of one row: token content and coordinate. All words of the row follow from it.
constexpr std::uint64_t row_key(ContentId content, std::uint64_t coord) {
  return mix(content ^ coord);
}
// The first `count` bytes of `word`, the others 0; all of them if count is 8 or more.
constexpr std::uint64_t first_bytes(std::uint64_t word, std::int64_t count) {
  return count >= 8 ? word : word & ((std::uint64_t{1} << (8 * count)) - 1);
}

// The shape of one row. If rows have their own scales, it follows from the largest of the row's
// elements, or from its extremes for int4: O(row). Other shapes return unchanged.
inline Int4Row int4_row_of(std::uint64_t key, std::uint64_t elements);
inline WordShape shape_of_row(std::uint64_t key, WordShape shape) {
  if (shape.is_int4) shape.int4 = int4_row_of(key, 2 * shape.scale_at);
  if (shape.by_largest == nullptr) return shape;
  std::size_t largest = 0;
  for (std::uint64_t i = 0; i < shape.scale_at / 4; ++i)
    for (std::uint64_t four = mix(key + (i + 1) * kWordStep), e = 0; e < 4; ++e, four >>= 16)
      largest = std::max(largest, source_index(four) % kMagnitudes);
  shape.stored = shape.by_largest + largest;
  return shape;
}

// The stored numbers of a group of 16 elements, which follow from the largest of them.
constexpr const StoredNumbers& numbers_of_group(std::uint64_t key, std::uint64_t group,
                                                WordShape shape) {
  std::size_t largest = 0;
  for (std::uint64_t word = 4 * group; word < 4 * group + 4; ++word)
    for (std::uint64_t four = mix(key + (word + 1) * kWordStep), e = 0; e < 4; ++e, four >>= 16)
      largest = std::max(largest, source_index(four) % kMagnitudes);
  return shape.by_group[largest];
}
// Element i of the row before quantization.
inline float source_number(std::uint64_t key, std::uint64_t i) {
  const std::uint64_t four = mix(key + (i / 4 + 1) * kWordStep) >> 16 * (i % 4);
  return std::bit_cast<float>(source_bits(source_index(four)) << 16);
}
// The scale and zero of a row, from its lowest and highest element.
inline Int4Row int4_row_of(std::uint64_t key, std::uint64_t elements) {
  float lowest = source_number(key, 0), highest = lowest;
  for (std::uint64_t i = 1; i < elements; ++i) {
    lowest = std::min(lowest, source_number(key, i));
    highest = std::max(highest, source_number(key, i));
  }
  return int4_row(lowest, highest);
}
// Word i of an int4 row: two elements per byte, the first in the lower half; then the scale's four
// bytes; then zeros.
inline std::uint64_t int4_word(std::uint64_t key, std::uint64_t i, const WordShape& shape) {
  std::uint64_t word = 0;
  for (std::uint64_t byte = 8 * i + 8; byte-- > 8 * i;) {
    std::uint64_t now = 0;
    if (byte < shape.scale_at)
      now = static_cast<std::uint64_t>(shape.int4.nearest(source_number(key, 2 * byte)) +
                                       16 * shape.int4.nearest(source_number(key, 2 * byte + 1)));
    else if (byte < shape.scale_at + 4)
      now = shape.int4.bits() >> 8 * (byte - shape.scale_at) & 0xFF;
    word = word << 8 | now;
  }
  return word;
}
// Word i of an nvfp4 row: 16 elements of four bits, or the scale bytes of 8 groups.
constexpr std::uint64_t packed_word(std::uint64_t key, std::uint64_t i, WordShape shape) {
  std::uint64_t word = 0;
  if (8 * i >= shape.scale_at) {
    for (std::uint64_t byte = 0; byte < 8; ++byte)
      word |= std::uint64_t{numbers_of_group(key, 8 * i - shape.scale_at + byte, shape).scale_bits}
              << 8 * byte;
    return word;
  }
  const StoredNumbers& stored = numbers_of_group(key, i, shape);
  for (std::uint64_t element = 0; element < 16; ++element) {
    const std::uint64_t four = mix(key + (4 * i + element / 4 + 1) * kWordStep);
    word |= std::uint64_t{stored.bytes[source_index(four >> 16 * (element % 4))]} << 4 * element;
  }
  return word;
}

// Word i of the row. REQUIRES: shape is shape_of_row(key, ...).
inline std::uint64_t row_word(std::uint64_t key, std::uint64_t i, WordShape shape) {
  if (shape.is_int4) return int4_word(key, i, shape);
  if (shape.by_group != nullptr) return packed_word(key, i, shape);
  if (shape.stored == nullptr) return shape(mix(key + (i + 1) * kWordStep));
  std::uint64_t word = 0;
  for (int half = 1; half >= 0; --half) {
    const std::uint64_t source =
        mix(key + (2 * i + static_cast<std::uint64_t>(half) + 1) * kWordStep);
    for (int element = 3; element >= 0; --element)
      word = word << 8 | shape.stored->bytes[source_index(source >> 16 * element)];
  }
  // The word in which the scale begins: elements first, then the scale's four bytes.
  if (8 * i + 8 <= shape.scale_at) return word;
  const std::uint64_t elements = shape.scale_at - 8 * i;  // of the word: 4 or none
  const std::uint64_t scale = std::bit_cast<std::uint32_t>(shape.stored->scale);
  return first_bytes(word, static_cast<std::int64_t>(elements)) | scale << 8 * elements;
}

// Rule (2): word i of a state tensor after one more token, with step_key = content ^ coordinate.
// Order matters: a state that skips a token or repeats one differs in every word.
constexpr std::uint64_t next_state_word(std::uint64_t word, std::uint64_t step_key,
                                        std::uint64_t i) {
  return word * kStateStep + mix(step_key ^ i);
}

// The content of unwritten bytes: never allocated; freed and allocated again; outside of every
// page; allocated again and to be zeroed. Each has its own poison, so a diagnosis names the reason.
enum class Unwritten : std::uint8_t { fresh = 0, freed = 1, padding = 2, zeroed = 3 };
// Rule (6): the poison of one page, and word i of it.
constexpr std::uint64_t poison_key(Unwritten kind, std::int64_t tensor, std::int64_t page) {
  return mix(0x706F69736F6E0000ull + static_cast<std::uint64_t>(kind)) ^
         mix(static_cast<std::uint64_t>(tensor) << 32 | static_cast<std::uint64_t>(page));
}
constexpr std::uint64_t poison_word(std::uint64_t key, std::uint64_t i) { return key ^ i; }

// Rule (3): a 128-bit sum over the words of a page, in any order and any split. Subtracting a
// word's term removes the word.
struct PageSum {
  std::uint64_t a = 0;
  std::uint64_t b = 0;
  constexpr PageSum& operator+=(const PageSum& other) {
    a += other.a;
    b += other.b;
    return *this;
  }
  constexpr PageSum& operator-=(const PageSum& other) {
    a -= other.a;
    b -= other.b;
    return *this;
  }
  bool operator==(const PageSum&) const = default;
};

// The keys of word i of a page. All tensors share them: a page's number is not in its sum.
struct WordKeys {
  std::uint64_t k = 0;
  std::uint64_t m = 0;
};
constexpr WordKeys word_keys(std::uint64_t i) { return {mix(2 * i), mix(2 * i + 1)}; }

// The term of one word: 32-bit halves plus key halves, multiplied, plus the word. The product makes
// swapped or shifted words visible.
constexpr PageSum page_term(std::uint64_t word, WordKeys keys) {
  const auto low = static_cast<std::uint32_t>(word);
  const auto high = static_cast<std::uint32_t>(word >> 32);
  const auto product = [&](std::uint64_t key) {
    const std::uint32_t x = low + static_cast<std::uint32_t>(key);
    const std::uint32_t y = high + static_cast<std::uint32_t>(key >> 32);
    return static_cast<std::uint64_t>(x) * y;
  };
  return {product(keys.k) + word, product(keys.m) + std::rotl(word, 32)};
}

// Rule (4): attention digests. A row's digest is the sum of its words' terms; placed_digest() adds
// its position in the sequence.
constexpr std::uint64_t row_digest_term(std::uint64_t word, std::uint64_t i) {
  return mix(word ^ (i + 1) * kWordStep);
}
constexpr std::uint64_t placed_digest(std::uint64_t row_digest, std::int64_t position,
                                      std::int64_t part, std::int64_t head) {
  return mix(row_digest ^
             mix(static_cast<std::uint64_t>(position) << 16 |
                 static_cast<std::uint64_t>(part) << 15 | static_cast<std::uint64_t>(head)));
}

// Words of n bytes, the last one possibly in part.
constexpr std::int64_t num_words(std::int64_t size_bytes) { return (size_bytes + 7) / 8; }

}  // namespace lockstep
