// Bytes from one place to another, whatever the alignment: states between blocks (mode `align`),
// and a convolution's state shifted within its own block.
//
// 1. A move whose source and target overlap is done by one CTA, tile by tile from the end that the
//    move comes from, each tile read whole before any of it is written: the result is memmove's.
//    Done in parallel, as vLLM once did (issue 50729), early writes meet late reads.
// 2. Accesses are as wide as both ends allow: 16 bytes when they are aligned alike to 16, then 8,
//    4, 2, 1; head and tail go by bytes. 3. Undefined bytes are moved as such.
#pragma once

#include "cuda_backend/kernels/engine_params.h"
#include "cuda_backend/kernels/words.cuh"

namespace lockstep::cuda {
namespace SIMT_VARIANT {

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
  switch (bytes) {
    case 16:
      simt::copy16(target, source);
      break;
    case 8:
      simt::copy_value(reinterpret_cast<std::uint64_t*>(target),
                       reinterpret_cast<const std::uint64_t*>(source));
      break;
    case 4:
      simt::copy_value(reinterpret_cast<std::uint32_t*>(target),
                       reinterpret_cast<const std::uint32_t*>(source));
      break;
    case 2:
      simt::copy_value(reinterpret_cast<std::uint16_t*>(target),
                       reinterpret_cast<const std::uint16_t*>(source));
      break;
    default:
      simt::copy_value(target, source);
  }
}

inline constexpr int kMoveThreads = 256;

// One tile at a time through shared memory, in the direction in which no tile overwrites a later
// one.
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
// kShiftRaces is KernelDefect::shift_race, which is planted here because no item can say in which
// order its bytes go.
template <bool kShiftRaces>
__global__ void move_bytes_kernel(MoveBytesParams p) {
  SIMT_SHARED_ARRAY(simt::vec16, staged, kMoveThreads);
  const ByteMove move = p.moves[blockIdx.x];
  if (move.size_bytes == 0 || move.target == move.source) return;
  const MoveShape shape = shape_of(move);
  const std::int64_t apart =
      move.target < move.source ? move.source - move.target : move.target - move.source;
  if (!kShiftRaces && apart < move.size_bytes) {
    if (blockIdx.y == 0) move_in_order(move, shape, staged);
    return;
  }
  for (std::int64_t i = std::int64_t(blockIdx.y) * blockDim.x + threadIdx.x; i < shape.count;
       i += std::int64_t(gridDim.y) * blockDim.x) {
    const MovePiece piece = piece_of(shape, i);
    copy_piece(move.target + piece.at, move.source + piece.at, piece.bytes);
  }
}

// Blocks of one cache to blocks of another, each with strides of its own: swaps between the device
// and pinned host memory, pages gathered into a contiguous buffer and back, hidden states taken out
// of padded pages. A byte is found by its block and its offset in the block; a cache is never taken
// for one long array (vLLM pull request 39949).
//
// 1. Padding on either side is neither read nor written. 2. Undefined bytes are copied as such.
// 3. Target blocks of one launch are distinct, and no target is a source.
template <class Unit>
__device__ __forceinline__ void copy_page_units(std::byte* target, const std::byte* source,
                                                std::int64_t size_bytes) {
  const std::int64_t count = size_bytes / std::int64_t(sizeof(Unit));
  for (std::int64_t i = std::int64_t(blockIdx.z) * blockDim.x + threadIdx.x; i < count;
       i += std::int64_t(gridDim.z) * blockDim.x) {
    if constexpr (sizeof(Unit) == 16) {
      simt::copy16(target + 16 * i, source + 16 * i);
    } else {
      simt::copy_value(reinterpret_cast<Unit*>(target) + i,
                       reinterpret_cast<const Unit*>(source) + i);
    }
  }
}

// Grid: x is the pair of blocks, y the region, z shares the region.
__global__ void copy_pages_kernel(CopyPagesParams p) {
  const BlockPair pair = p.pairs[blockIdx.x];
  const PageRegion region = p.regions[blockIdx.y];
  std::byte* target = region.target + pair.target * region.target_stride;
  const std::byte* source = region.source + pair.source * region.source_stride;
  switch (region.unit_bytes) {
    case 16:
      return copy_page_units<simt::vec16>(target, source, region.size_bytes);
    case 8:
      return copy_page_units<std::uint64_t>(target, source, region.size_bytes);
    case 4:
      return copy_page_units<std::uint32_t>(target, source, region.size_bytes);
    case 2:
      return copy_page_units<std::uint16_t>(target, source, region.size_bytes);
    default:
      return copy_page_units<std::uint8_t>(target, source, region.size_bytes);
  }
}

}  // namespace SIMT_VARIANT
}  // namespace lockstep::cuda
