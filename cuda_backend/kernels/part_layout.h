// Where one part of a layer lies: its K, its V, the latent or the rope half of MLA. Every layout
// that engines use is a choice of strides, all in bytes:
//
//   NHD      [num_blocks, block_size, num_heads, head_size]          rows are whole
//   HND      [num_blocks, num_heads, block_size, head_size]          rows are whole
//   x-split  K [num_blocks, num_heads, head_size/x, block_size, x]   pieces of x elements
//            V [num_blocks, num_heads, head_size, block_size]        pieces of one element
//   MLA      [num_blocks, block_size, latent + rope]                 two parts of one row
//
// 1. A row (one token, one head) is ceil(head_size / piece_elements) pieces, piece_stride apart.
// 2. Padding of pages, of blocks and between pieces belongs to no part.
// 3. stored = round(value / scale) and value = stored * scale. A per_token_head scale is an fp32
//    that lies where its strides say: behind the row, or in a tensor of its own.
#pragma once

#include "cuda_backend/kernels/params.h"

namespace lockstep::cuda {

enum class Scaling : std::uint8_t { none, per_tensor, per_token_head };

struct PartLayout {
  std::byte* base = nullptr;  // element 0 of head 0 of token 0 of block 0
  std::int64_t block_stride = 0;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;
  std::int64_t piece_stride = 0;
  std::byte* scales = nullptr;  // the scale, or that of head 0 of token 0 of block 0; 4-aligned
  std::int64_t scale_block_stride = 0;
  std::int64_t scale_token_stride = 0;
  std::int64_t scale_head_stride = 0;
  Divisor block_size;  // tokens in a block that block tables and slots name
  std::int32_t num_heads = 1;
  std::int32_t head_size = 0;       // elements of a row
  std::int32_t piece_elements = 1;  // contiguous elements; head_size where rows are whole
  DType dtype = DType::bf16;
  Scaling scaling = Scaling::none;
};

}  // namespace lockstep::cuda
