// Pages as bytes: the fingerprint of an image, words in and out of it.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>

#include "reference/memory/content.h"
#include "reference/memory/memory_model.h"

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

// The bytes of one row. They are contiguous, except rows of nvfp4 as numbers: FlashInfer writes a
// block as [K data
// K scales
// V data
// V scales], whatever shape its tensor has (vllm/v1/attention/backends/flashinfer.py,
// _nvfp4_kv_views), so a row is two pieces, and so are rows of MLA whose scales follow the data of
// a page (latent rows).
//
// Invariants
// (1) The pieces of all rows of a block cover the bytes that its layer uses there, each once.
// (2) Areas hold whole tokens of all heads or whole heads of all tokens, as rows of the tensor do.

struct RowPiece {
  std::int64_t offset = 0;  // byte of the plan
  std::int64_t in_row = 0;  // byte of the row that it begins with
  std::int64_t size_bytes = 0;
};

class RowPieces {
 public:
  explicit RowPieces(RowPiece whole) : pieces_{whole}, count_(1) {}
  RowPieces(RowPiece first, RowPiece second) : pieces_{first, second}, count_(2) {}
  const RowPiece* begin() const { return pieces_.data(); }
  const RowPiece* end() const { return pieces_.data() + count_; }

 private:
  std::array<RowPiece, 2> pieces_;
  int count_;
};

// `slot`: of rows, in the block.
RowPieces row_pieces(const ModelLayer& layer, BlockId block, std::int64_t kv, std::int64_t slot,
                     std::int64_t head);

// Why the areas of a layer's rows (data_bytes set) cannot lie in this layout.
std::optional<std::string> why_no_areas(const ModelLayer& layer);

// Bytes from byte `in_row` of a row to the end of its piece.
std::int64_t rest_of_piece(const ModelLayer& layer, std::int64_t in_row);

}  // namespace lockstep
