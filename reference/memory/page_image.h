// Pages as bytes: the fingerprint of an image, words and rows in and out of it, and the places of a
// row's bytes.
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

// Rule (3) of sim/protocol/backend.h over all bytes of a page. A truncated last word is padded with
// zeros. `keys`: those of the first words, computed before, or none.
PageSum page_sum(std::span<const std::uint8_t> image, std::span<const WordKeys> keys = {});

// Word i of the bytes; a truncated last word is padded with zeros. REQUIRES: 8 * i < bytes.size().
inline std::uint64_t load_word(std::span<const std::uint8_t> bytes, std::size_t i) {
  std::uint64_t word = 0;
  const std::size_t size = bytes.size() - 8 * i;
  std::memcpy(&word, bytes.data() + 8 * i, size < 8 ? size : 8);
  return word;
}
// Writes word i; of a truncated last word only its first bytes.
inline void store_word(std::span<std::uint8_t> bytes, std::size_t i, std::uint64_t word) {
  const std::size_t size = bytes.size() - 8 * i;
  std::memcpy(bytes.data() + 8 * i, &word, size < 8 ? size : 8);
}

// Writes the bytes of one row: `row` has its size, scales included.
void draw_row(ContentId content, std::uint64_t coord, WordShape shape, std::span<std::uint8_t> row);
// The same for a row of the layer; `coord` is an index of ModelLayer::coords.
void draw_row(const ModelLayer& layer, ContentId content, std::size_t coord,
              std::span<std::uint8_t> row);

// The shape of the words of a layer's rows; `layer` as in rule (1).
WordShape row_words(Numbers numbers, const KVCacheSpec& spec, std::int64_t layer);

// The bytes of one row. They are contiguous, with two exceptions. For rows of nvfp4 as numbers,
// FlashInfer writes a block as [K data, K scales, V data, V scales], whatever shape its tensor has
// (vllm/v1/attention/backends/flashinfer.py, _nvfp4_kv_views). Rows of MLA whose scales follow the
// data of a page are the other (latent rows). Both consist of two pieces.
//
// Invariants
// (1) The pieces of all rows of a block cover the bytes that its layer uses there, each once.
// (2) Areas hold whole tokens of all heads or whole heads of all tokens, like rows of the tensor.

// Contiguous bytes of a row.
struct RowPiece {
  std::int64_t offset = 0;  // byte of the plan
  std::int64_t in_row = 0;  // first byte of the row in this piece
  std::int64_t size_bytes = 0;
};

// One or two pieces, without an allocation.
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

// The pieces of row `slot` (counted in rows, in the block) of part `kv` and `head`.
RowPieces row_pieces(const ModelLayer& layer, BlockId block, std::int64_t kv, std::int64_t slot,
                     std::int64_t head);

// The reason why rows with separate scale areas (data_bytes > 0) do not fit this layout; absent:
// they fit.
std::optional<std::string> why_no_areas(const ModelLayer& layer);

// Bytes from byte `in_row` of a row to the end of its piece.
std::int64_t rest_of_piece(const ModelLayer& layer, std::int64_t in_row);

}  // namespace lockstep
