#include "reference/memory/row_pieces.h"

#include <fmt/core.h>

namespace lockstep {
namespace {

// Whether the tokens of a head follow each other.
bool has_heads_outside(const ModelLayer& layer) {
  return layer.layout.token_stride_bytes == layer.row_size_bytes;
}

}  // namespace

std::optional<std::string> why_no_areas(const ModelLayer& layer) {
  const LayerLayout& at = layer.layout;
  const std::int64_t row = layer.row_size_bytes;
  if (at.num_kv == 1 && at.num_kv_heads == 1 && has_heads_outside(layer)) return std::nullopt;
  const std::int64_t next_head =
      at.num_kv_heads > 1 ? at.head_stride_bytes : at.kv_stride_bytes;  // V's heads follow K's
  const bool is_dense =
      has_heads_outside(layer)
          ? next_head == at.kernel_block_size * row
          : next_head == row && at.token_stride_bytes == 2 * at.num_kv_heads * row;
  if (is_dense && at.kv_stride_bytes == at.num_kv_heads * next_head) return std::nullopt;
  return fmt::format(
      "{}: its scales lie in areas of a block that is dense in its layer, which it is not in "
      "this order; choose LBNHC, LBHNC, BLNHC or BLHNC",
      layer.name);
}

RowPieces row_pieces(const ModelLayer& layer, BlockId block, std::int64_t kv, std::int64_t slot,
                     std::int64_t head) {
  const LayerLayout& at = layer.layout;
  const std::int64_t row = layer.row_size_bytes;
  if (layer.data_bytes == 0) return RowPieces({byte_offset(at, block, kv, slot, head, 0), 0, row});
  const std::int64_t tokens = at.kernel_block_size, in_kernel_block = slot % tokens;
  const std::int64_t rows = tokens * at.num_kv_heads;  // of K, and of V
  const std::int64_t before = has_heads_outside(layer) ? head * tokens + in_kernel_block
                                                       : in_kernel_block * at.num_kv_heads + head;
  const std::int64_t area =
      byte_offset(at, block, 0, slot - in_kernel_block, 0, 0) + kv * rows * row;
  const std::int64_t data = layer.data_bytes, scales = row - data;
  return RowPieces({area + before * data, 0, data},
                   {area + rows * data + before * scales, data, scales});
}

std::int64_t rest_of_piece(const ModelLayer& layer, std::int64_t in_row) {
  return (in_row < layer.data_bytes ? layer.data_bytes : layer.row_size_bytes) - in_row;
}

}  // namespace lockstep
