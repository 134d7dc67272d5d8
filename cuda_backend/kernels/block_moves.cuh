// Whole blocks: zeroes, copies and poisons their regions, and advances their states.
//
// 1. Bytes outside a region are not touched. Regions of zero and copy are what layers use, regions
//    of poison are whole pages.
// 2. Padding on either side of a copy is neither read nor written. A byte is found by its block and
//    its offset in the block: a padded cache is not one long array (vLLM pull request 39949).
// 3. Undefined bytes are copied as undefined.
// 4. Blocks of one launch are distinct, and no target of a copy is a source of another.
#pragma once

#include "cuda_backend/kernels/engine_params.h"
#include "cuda_backend/kernels/words.cuh"

namespace lockstep::cuda {
namespace SIMT_VARIANT {

// The threads of all CTAs along z share a region, unit by unit.
__device__ __forceinline__ std::int64_t first_in_region() {
  return std::int64_t(blockIdx.z) * blockDim.x + threadIdx.x;
}
__device__ __forceinline__ std::int64_t step_in_region() {
  return std::int64_t(gridDim.z) * blockDim.x;
}

template <class Unit>
__device__ __forceinline__ void zero_units(std::byte* at, std::int64_t size_bytes) {
  const std::int64_t count = size_bytes / std::int64_t(sizeof(Unit));
  for (std::int64_t i = first_in_region(); i < count; i += step_in_region())
    reinterpret_cast<Unit*>(at)[i] = Unit{};
}

// Grid: x is the block to zero, y the region of its group, z shares the region.
[[maybe_unused]] static __global__ void zero_blocks_kernel(ZeroBlocksParams p) {
  const GroupBlockItem item = p.items[blockIdx.x];
  const RegionRange range = p.groups[item.group];
  if (std::int32_t(blockIdx.y) >= range.end - range.begin) return;
  const BlockRegion region = p.regions[range.begin + blockIdx.y];
  std::byte* at = region.base + item.block * region.block_stride;
  with_unit(region.unit_bytes,
            [&](auto unit) { zero_units<decltype(unit)>(at, region.size_bytes); });
}

template <class Unit>
__device__ __forceinline__ void copy_units(std::byte* to, const std::byte* from,
                                           std::int64_t size_bytes) {
  const std::int64_t count = size_bytes / std::int64_t(sizeof(Unit));
  for (std::int64_t i = first_in_region(); i < count; i += step_in_region())
    simt::copy_value(reinterpret_cast<Unit*>(to) + i, reinterpret_cast<const Unit*>(from) + i);
}

// Grid: x is the copy, y the region of its group, z shares the region.
[[maybe_unused]] static __global__ void copy_blocks_kernel(CopyBlocksParams p) {
  const BlockCopyItem item = p.items[blockIdx.x];
  const RegionRange range = p.groups[item.group];
  if (std::int32_t(blockIdx.y) >= range.end - range.begin) return;
  const CopyRegion region = p.regions[range.begin + blockIdx.y];
  std::byte* to = region.target + item.target * region.target_stride;
  const std::byte* from = region.source + item.source * region.source_stride;
  with_unit(region.unit_bytes,
            [&](auto unit) { copy_units<decltype(unit)>(to, from, region.size_bytes); });
}

// Grid: x is the block to poison, y the region, z shares the region. Words count from the start of
// the region's page, so a region may start and end inside a word.
[[maybe_unused]] static __global__ void poison_blocks_kernel(PoisonBlocksParams p) {
  PoisonItem item{std::int32_t(blockIdx.x), p.kind_of_all};
  if (p.items != nullptr) item = p.items[blockIdx.x];
  const BlockRegion region = p.regions[blockIdx.y];
  const std::int64_t page_size_bytes = p.page_size_bytes[region.tensor];
  const std::int64_t in_tensor = region.tensor_offset + item.block * region.block_stride;
  const std::int64_t page = in_tensor / page_size_bytes;
  const std::int64_t begin = in_tensor - page * page_size_bytes, end = begin + region.size_bytes;
  std::byte* page_at = region.base + item.block * region.block_stride - begin;
  const std::uint64_t key = mix(0x706F69736F6E0000ull + item.kind) ^
                            mix(std::uint64_t(region.tensor) << 32 | std::uint64_t(page));
  if (region.unit_bytes == 16) {
    for (std::int64_t i = begin / 16 + first_in_region(); i < end / 16; i += step_in_region())
      *reinterpret_cast<simt::vec16*>(page_at + 16 * i) =
          join_words(key ^ (2 * i), key ^ (2 * i + 1));
    return;
  }
  for (std::int64_t i = begin / 8 + first_in_region(); 8 * i < end; i += step_in_region()) {
    const std::int64_t from = 8 * i < begin ? begin : 8 * i;
    const std::int64_t to = 8 * i + 8 > end ? end : 8 * i + 8;
    store_word(page_at + from, (key ^ std::uint64_t(i)) >> (8 * (from - 8 * i)),
               std::int32_t(to - from), region.unit_bytes);
  }
}

// Recurrent states (Mamba, linear attention) as words that every token advances: rule (2) of
// sim/protocol/backend.h. A word depends on all tokens so far, so one missing, extra or wrong token
// changes every word.
//
// 1. source and target may be the same block: one thread reads and writes each word.
// 2. The null block as source is the zero state and is not read.
// 3. A checkpoint receives the word after checkpoint_tokens of the tokens.
inline constexpr std::uint32_t kPartState = 16;

inline constexpr std::uint64_t kStateStep = 0xD1342543DE82EF95ull;

#if KERNELS_HAVE_WIDE_WORDS
// 32 words of a state from word `i` on. Four vectors overlap: each multiplication of a vector needs
// its previous one.
[[maybe_unused]] LS_WIDE_WORDS static void update_wide(const StateUpdateItem& item,
                                                       const std::uint64_t* contents,
                                                       std::uint64_t place, std::int64_t i,
                                                       const std::byte* from, std::byte* checkpoint,
                                                       std::byte* to) {
  constexpr int kVectors = 4;
  WideWords words[kVectors]{}, keys[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    if (item.source != 0) words[v] = load_wide(from + 8 * i + 64 * v);
    keys[v] = (std::uint64_t(i + 8 * v) + WideWords{0, 1, 2, 3, 4, 5, 6, 7}) ^ place;
  }
  for (std::int32_t n = 0; n < item.num_tokens; ++n) {
    for (int v = 0; v < kVectors; ++v)
      words[v] = words[v] * kStateStep + mix8(keys[v] ^ contents[n]);
    if (item.checkpoint != 0 && n + 1 == item.checkpoint_tokens)
      for (int v = 0; v < kVectors; ++v) store_wide(checkpoint + 8 * i + 64 * v, words[v]);
  }
  for (int v = 0; v < kVectors; ++v) store_wide(to + 8 * i + 64 * v, words[v]);
}
#endif

// Grid: x is the update, y the state tensor of its group, z shares the words.
[[maybe_unused]] static __global__ void state_update_kernel(StateUpdateParams p) {
  const StateUpdateItem item = p.items[blockIdx.x];
  if (item.group < 0) return;
  const RegionRange range = p.groups[item.group];
  if (std::int32_t(blockIdx.y) >= range.end - range.begin) return;
  const StateCache state = p.states[range.begin + blockIdx.y];
  const std::byte* from = state.base + item.source * state.page_stride;
  std::byte* to = state.base + item.target * state.page_stride;
  std::byte* checkpoint = state.base + item.checkpoint * state.page_stride;
  const std::uint64_t place = coordinate(state.layer, kPartState + state.state, state.first_head);
  std::int64_t done = 0;  // words
#if KERNELS_HAVE_WIDE_WORDS
  if (state.unit_bytes >= 8 && has_wide_words()) {
    done = state.size_bytes / 256 * 32;
    for (std::int64_t i = 32 * first_in_region(); i < done; i += 32 * step_in_region())
      update_wide(item, p.contents + item.first_token, place, i, from, checkpoint, to);
  }
#endif
  for (std::int64_t i = done + first_in_region(); 8 * i < state.size_bytes; i += step_in_region()) {
    const std::int64_t left = state.size_bytes - 8 * i;
    const std::int32_t bytes = left < 8 ? std::int32_t(left) : 8;
    std::uint64_t word = 0;
    if (item.source != 0) word = load_word(from + 8 * i, bytes, state.unit_bytes);
    for (std::int32_t n = 0; n < item.num_tokens; ++n) {
      const std::uint64_t content = p.contents[item.first_token + n];
      word = word * kStateStep + mix(content ^ place ^ std::uint64_t(i));
      if (item.checkpoint != 0 && n + 1 == item.checkpoint_tokens)
        store_word(checkpoint + 8 * i, word, bytes, state.unit_bytes);
    }
    store_word(to + 8 * i, word, bytes, state.unit_bytes);
  }
}

// Moves bytes of any alignment: states between blocks (mode `align`), and a convolution's state
// within its own block.
//
// 1. One CTA does an overlapping move, tile by tile in the direction of the move. It reads a tile
//    completely before it writes it, so the result is memmove's. In parallel, as vLLM once did
//    (issue 50729), early writes race with late reads.
// 2. Accesses are as wide as both ends allow: 16 bytes if both have the same offset from 16, then
//    8, 4, 2, 1. Head and tail are moved byte by byte.
// 3. Undefined bytes stay undefined.

// Items 0 .. count-1 of a move: first the head's bytes, then units, then the tail's bytes.
struct MoveShape {
  std::int32_t unit;
  std::int64_t head, units, count;
};
__device__ __forceinline__ MoveShape shape_of(const ByteMove& move) {
  const auto target = reinterpret_cast<std::uintptr_t>(move.target);
  const std::uintptr_t apart = target ^ reinterpret_cast<std::uintptr_t>(move.source);
  MoveShape shape{16, 0, 0, 0};
  while ((apart & (shape.unit - 1)) != 0) shape.unit /= 2;
  shape.head = std::int64_t(-target & (shape.unit - 1));
  if (shape.head > move.size_bytes) shape.head = move.size_bytes;
  shape.units = (move.size_bytes - shape.head) / shape.unit;
  shape.count =
      shape.head + shape.units + (move.size_bytes - shape.head - shape.units * shape.unit);
  return shape;
}

// Where item i begins, and how long it is.
struct MovePiece {
  std::int64_t at;
  std::int32_t bytes;
};
__device__ __forceinline__ MovePiece piece_of(const MoveShape& shape, std::int64_t i) {
  if (i < shape.head) return {i, 1};
  if (i < shape.head + shape.units) return {shape.head + (i - shape.head) * shape.unit, shape.unit};
  return {shape.head + shape.units * shape.unit + (i - shape.head - shape.units), 1};
}

__device__ __forceinline__ void copy_piece(std::byte* target, const std::byte* source,
                                           std::int32_t bytes) {
  with_unit(bytes, [&](auto unit) {
    using Unit = decltype(unit);
    simt::copy_value(reinterpret_cast<Unit*>(target), reinterpret_cast<const Unit*>(source));
  });
}

inline constexpr int kMoveThreads = 256;

// Moves one tile at a time through shared memory, in the direction in which no tile overwrites a
// later one.
__device__ __forceinline__ void move_in_order(const ByteMove& move, const MoveShape& shape,
                                              simt::vec16* staged) {
  const bool forward = move.target < move.source;
  const std::int64_t tiles = (shape.count + blockDim.x - 1) / blockDim.x;
  for (std::int64_t n = 0; n < tiles; ++n) {
    const std::int64_t i = (forward ? n : tiles - 1 - n) * blockDim.x + threadIdx.x;
    const MovePiece piece = i < shape.count ? piece_of(shape, i) : MovePiece{0, 0};
    auto* own = reinterpret_cast<std::byte*>(staged + threadIdx.x);
    if (piece.bytes > 0) copy_piece(own, move.source + piece.at, piece.bytes);
    __syncthreads();
    if (piece.bytes > 0) copy_piece(move.target + piece.at, own, piece.bytes);
    __syncthreads();
  }
}

// Grid: x is the move, y shares the items of those that do not overlap. At most kMoveThreads.
[[maybe_unused]] static __global__ void move_bytes_kernel(MoveBytesParams p) {
  SIMT_SHARED_ARRAY(simt::vec16, staged, kMoveThreads);
  const ByteMove move = p.moves[blockIdx.x];
  if (move.size_bytes == 0 || move.target == move.source) return;
  const MoveShape shape = shape_of(move);
  const std::int64_t apart =
      move.target < move.source ? move.source - move.target : move.target - move.source;
  if (apart < move.size_bytes) {
    if (blockIdx.y == 0) move_in_order(move, shape, staged);
    return;
  }
  for (std::int64_t i = std::int64_t(blockIdx.y) * blockDim.x + threadIdx.x; i < shape.count;
       i += std::int64_t(gridDim.y) * blockDim.x) {
    const MovePiece piece = piece_of(shape, i);
    copy_piece(move.target + piece.at, move.source + piece.at, piece.bytes);
  }
}

}  // namespace SIMT_VARIANT
}  // namespace lockstep::cuda
