// Pages as bytes: the fingerprint of an image, words in and out of it.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <span>

#include "reference/memory/content.h"
#include "reference/memory/numbers.h"

namespace lockstep {

struct ModelLayer;  // memory_model.h

static_assert(std::endian::native == std::endian::little, "words are little-endian bytes");

// Rule (3) of sim/protocol/backend.h over all bytes of a page.
PageSum page_sum(std::span<const std::uint8_t> image);

// Word i of the image; a last word that is cut short is filled with zero bytes.
inline std::uint64_t load_word(std::span<const std::uint8_t> bytes, std::size_t i) {
  std::uint64_t word = 0;
  const std::size_t size = bytes.size() - 8 * i;
  std::memcpy(&word, bytes.data() + 8 * i, size < 8 ? size : 8);
  return word;
}
inline void store_word(std::span<std::uint8_t> bytes, std::size_t i, std::uint64_t word) {
  const std::size_t size = bytes.size() - 8 * i;
  std::memcpy(bytes.data() + 8 * i, &word, size < 8 ? size : 8);
}

// The bytes of one row.
void draw_row(ContentId content, std::uint64_t coord, WordShape shape, std::span<std::uint8_t> row);
// A row of a layer; `coord`: of ModelLayer::coords.
void draw_row(const ModelLayer& layer, ContentId content, std::size_t coord,
              std::span<std::uint8_t> row);

// What the words of rows are in a layer; `layer` as in rule (1).
WordShape row_words(Numbers numbers, const KVCacheSpec& spec, std::int64_t layer);

}  // namespace lockstep
