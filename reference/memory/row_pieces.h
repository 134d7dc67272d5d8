// The bytes of one row. They are contiguous, except rows of nvfp4 as numbers: FlashInfer writes a
// block as [K data
// K scales
// V data
// V scales], whatever shape its tensor has (vllm/v1/attention/backends/flashinfer.py,
// _nvfp4_kv_views), so a row is two pieces, and so are rows of MLA whose scales follow the data of
// a page (latent_rows.h).
//
// Invariants
// (1) The pieces of all rows of a block cover the bytes that its layer uses there, each once.
// (2) Areas hold whole tokens of all heads or whole heads of all tokens, as rows of the tensor do.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "reference/memory/memory_model.h"

namespace lockstep {

struct RowPiece {
  std::int64_t offset = 0;  // in the row's tensor
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
