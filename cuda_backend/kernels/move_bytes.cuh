// Moves bytes of any alignment: states between blocks (mode `align`), and a convolution's state
// within its own block.
//
// 1. One CTA does an overlapping move, tile by tile in the direction of the move. It reads a tile
//    completely before it writes it, so the result is memmove's. In parallel, as vLLM once did
//    (issue 50729), early writes race with late reads.
// 2. Accesses are as wide as both ends allow: 16 bytes if both have the same offset from 16, then
//    8, 4, 2, 1. Head and tail are moved byte by byte. 3. Undefined bytes stay undefined.
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
