// Parameters of a serving engine's kernels and of their launchers: plain structs, passed by value.
// Offsets and strides are 64-bit and count bytes, unless a name says otherwise.
//
// 1. A pointer is a device pointer (or pinned host memory that the device can address).
// 2. A count of zero launches nothing. 3. Block 0 is the null block. As the source of a state it is
//    the zero state; as a target it discards the state.
#pragma once

#include "cuda_backend/kernels/params.h"

namespace lockstep::cuda {

// The addresses of one part of a layer: its K, its V, the latent or the rope half of MLA. Every
// layout that engines use is a choice of strides in bytes:
//
//   NHD      [num_blocks, block_size, num_heads, head_size]          rows are whole
//   HND      [num_blocks, num_heads, block_size, head_size]          rows are whole
//   x-split  K [num_blocks, num_heads, head_size/x, block_size, x]   pieces of x elements
//            V [num_blocks, num_heads, head_size, block_size]        pieces of one element
//   MLA      [num_blocks, block_size, latent + rope]                 two parts of one row
//
// 1. A row (one token, one head) is ceil(head_size / piece_elements) pieces, piece_stride apart.
// 2. Padding of pages, of blocks and between pieces belongs to no part.
// 3. stored = round(value / scale) and value = stored * scale. A per_token_head scale is an fp32 at
//    the address that its strides give: after the row, or in its own tensor.
// 4. Two elements per byte, the even one in its low half, in rows that are whole (dtype uint8):
//    int4_rows    0 to 15, value = (stored - zero) * scale. The row's fp32 scale has the address of
//    a
//                 per_token_head scale; the lowest four bits of its pattern are the row's zero.
//    fp4_groups   e2m1, value = stored * scale * *layer_scale, with an e4m3 scale per 16 elements:
//                 head_size / 16 bytes per token and head, at `scales` by the strides (nvfp4).
//                 swizzled_scales: the groups of 4 tokens are permuted, in the order that kernels
//                 of sm_100 read V's scales; block_size and the groups of a row are then multiples
//                 of 4.
// 5. Rows of sparse MLA in layouts of bytes, one head, [latent in tiles | rope of 64]: see
//    packed_rows.cuh. Scales are at `scales` by the strides. Rows and scales of 656 bytes are
//    aligned to 4 bytes, of 576 bytes to 2. latent_fp8_rows   656 bytes: 512 e4m3, an fp32 scale
//    for every 128, rope in bf16 latent_fp8_areas  576 bytes: 448 e4m3, rope in bf16; elsewhere 8
//    bytes of scales, exponents
//                      for every 64 elements and a 0
//    latent_fp4_rows   352 bytes: 512 e2m1, rope in e4m3, an e4m3 scale for every 16
enum class Scaling : std::uint8_t {
  none,
  per_tensor,
  per_token_head,
  int4_rows,
  fp4_groups,
  latent_fp8_rows,
  latent_fp8_areas,
  latent_fp4_rows
};
inline constexpr Scaling kFirstPacked = Scaling::int4_rows;        // and later ones
inline constexpr Scaling kFirstLatent = Scaling::latent_fp8_rows;  // and later ones

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
  bool swizzled_scales = false;
  const float* layer_scale = nullptr;  // fp4_groups
  // For kernels outside of this project: the layer in the rank's plan, and its kernel blocks.
  std::int32_t layer = 0, num_blocks = 0;
};

// Source rows of a layer's projection on their way into one part of its cache.
struct PartWrite {
  PartLayout to;
  const std::byte* source = nullptr;  // [num_rows, num_heads, head_size] by these strides
  std::int64_t source_row_stride = 0;
  std::int64_t source_head_stride = 0;
  DType source_dtype = DType::bf16;  // that of the part where scaling is none
};
struct WritePartsParams {
  PartWrite parts[2];
  const Slot* slots;  // of the tokens; PAD_SLOT_ID writes nothing
  std::int32_t num_parts;
  std::int32_t num_rows;
  TokenRows token_rows;
};

// Positions that a query reads: [first, last), where positions from gap_first on are `gap` higher.
struct KeyRange {
  std::int32_t first = 0, last = 0;
  std::int32_t gap_first = 0, gap = 0;
};
// Attention over a paged cache, for any mix of decoding requests and prefill chunks.
struct SplitAttentionParams {
  PartLayout key;                   // of the kernel's blocks
  PartLayout value;                 // MLA: the first head_size elements of the same rows
  const std::byte* queries;         // [num_tokens, num_query_heads, key.head_size]
  float* outputs;                   // [num_tokens, num_query_heads, value.head_size]
  float* partials;                  // [num_tokens, num_query_heads, num_splits, 2 + head_size]
  const std::int32_t* block_table;  // kernel block ids, [num_requests, table_width]
  const std::int32_t* token_rows;   // [num_tokens]: row of the table; below zero: a padded token
  const std::int32_t* positions;    // [num_tokens]: of the query in its request
  const std::int32_t* seq_lens;     // [num_requests]: read where causal is false
  std::int64_t table_width;         // entries
  // Positions of each query, [num_tokens]; null: those that causal, window and chunk imply.
  const KeyRange* ranges = nullptr;
  // The layer whose rows have sinks, a ring or a host copy; null: block_table has every row.
  const RowCache* rows = nullptr;
  float scale;  // of scores
  DType query_dtype;
  bool causal;          // a query sees positions up to its own
  std::int32_t window;  // tokens seen, the query's own included; 0: all
  std::int32_t chunk;   // tokens of a local chunk; 0: none
  std::int32_t num_tokens;
  std::int32_t num_query_heads;  // a multiple of key.num_heads
  std::int32_t num_splits;       // launched; enough for the longest range
  std::int32_t split_keys;       // positions that one split covers
};

// One request's part in a causal convolution over the tokens of its step. The convolution sees the
// `width - 1` inputs before the first token: positions [offset, offset + width - 1) of the source.
// The state afterwards is the sequence (these inputs, the tokens) from `keep_from` on:
//   a chunk, or one token:  offset 0, keep_from num_tokens: the last width - 1 inputs
//   speculative tokens:     offset num_accepted - 1, keep_from 1: room for every later acceptance
// A chunk may also export the `width - 1` inputs after its first checkpoint_tokens tokens.
struct ConvItem {
  std::int32_t source, target;  // blocks
  std::int32_t first_token, num_tokens;
  std::int32_t offset, keep_from;
  std::int32_t checkpoint = 0, checkpoint_tokens = 0;  // the block; 0: none
};
// conv_state of a block: [state_len, num_channels] or [num_channels, state_len] by its strides.
struct ConvParams {
  std::byte* states;  // in the page of block 0
  std::int64_t page_stride, channel_stride, position_stride;
  const std::byte* inputs;  // [num_tokens, num_channels]
  std::byte* outputs;       // [num_tokens, num_channels]
  std::int64_t input_token_stride, output_token_stride;
  const float* weights;  // [num_channels, width]
  const float* bias;     // [num_channels] or null
  const ConvItem* items;
  DType dtype;  // of states, inputs and outputs
  bool silu;
  std::int32_t num_items, num_channels, width;
  std::int32_t max_tokens;                 // of any item
  std::int32_t layer = 0, num_blocks = 0;  // as in PartLayout
};

// One request's part in a recurrence. After token i of the step, the state is stored in block
// state_targets[i]. The last token of a chunk, every speculative token, the token of a checkpoint
// and, in mode `all`, every token that ends a block have a target.
struct RecurrentItem {
  std::int32_t source, first_token, num_tokens;
};
struct RecurrentStates {
  std::byte* base = nullptr;  // in the page of block 0: [num_heads, rows, columns], C order
  std::int64_t page_stride = 0;
  DType dtype = DType::fp32;
  std::int32_t num_heads = 0;
  std::int32_t rows = 0;     // head_dim of Mamba2, head_v_dim of a delta rule
  std::int32_t columns = 0;  // d_state, head_k_dim; at most 256
  std::int32_t layer = 0, num_blocks = 0;  // as in PartLayout
};
// Mamba2: h = h * exp(A dt) + dt x B^T, y = h C + D x, gated by silu(z).
struct SelectiveStateParams {
  RecurrentStates states;
  const RecurrentItem* items;
  const std::int32_t* state_targets;  // [num_tokens]
  const float* x;                     // [num_tokens, num_heads, rows]
  const float* dt;                    // [num_tokens, num_heads], before bias and softplus
  const float* B;                     // [num_tokens, num_groups, columns]
  const float* C;                     // [num_tokens, num_groups, columns]
  const float* z;                     // [num_tokens, num_heads, rows] or null
  const float* A;                     // [num_heads], below zero
  const float* D;                     // [num_heads]
  const float* dt_bias;               // [num_heads]
  float* y;                           // [num_tokens, num_heads, rows]
  std::int32_t num_items, num_groups;
};
// Gated delta rule: h = h exp(g), h += beta (v - h k) k^T, o = h q scale.
struct GatedDeltaParams {
  RecurrentStates states;
  const RecurrentItem* items;
  const std::int32_t* state_targets;  // [num_tokens]
  const float* q;                     // [num_tokens, num_key_heads, columns]
  const float* k;                     // [num_tokens, num_key_heads, columns]
  const float* v;                     // [num_tokens, num_heads, rows]
  const float* g;                     // [num_tokens, num_heads], at most zero
  const float* beta;                  // [num_tokens, num_heads]
  float* o;                           // [num_tokens, num_heads, rows]
  float scale;
  bool normalise;  // q and k to length one
  std::int32_t num_items, num_key_heads;
};

// Bytes moved at any alignment. Source and target may overlap, for example a state shifted within
// its block. No item touches another's target.
struct ByteMove {
  std::byte* target;
  const std::byte* source;
  std::int64_t size_bytes;
};
struct MoveBytesParams {
  const ByteMove* moves;
  std::int32_t num_moves;
  std::int64_t max_size_bytes;
};

}  // namespace lockstep::cuda
