// Whether the rows of a part can be walked eight elements at a time: sizes, strides and addresses
// allow accesses of 16 bytes, or of 8 where eight elements are no more.
#pragma once

#include "cuda_backend/kernels/part_layout.h"

namespace lockstep::cuda {
namespace SIMT_VARIANT {

inline bool aligned_to(std::int64_t bytes, const void* address, std::int64_t a, std::int64_t b,
                       std::int64_t c, std::int64_t d) {
  const auto at = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(address));
  return (at | a | b | c | d) % bytes == 0;
}
inline std::int64_t bytes_of_eight(DType dtype) { return itemsize_bytes(dtype) == 1 ? 8 : 16; }
inline bool in_eights(const PartLayout& part) {
  const bool whole = part.piece_elements >= part.head_size;
  return part.head_size % 8 == 0 && (whole || part.piece_elements % 8 == 0) &&
         aligned_to(bytes_of_eight(part.dtype), part.base, part.block_stride, part.token_stride,
                    part.head_stride, whole ? 0 : part.piece_stride);
}

}  // namespace SIMT_VARIANT
}  // namespace lockstep::cuda
