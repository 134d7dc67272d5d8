// Kernels that copy: definedness and origin.
#pragma once

#include <cstdint>

#include "cuda_backend/simt/simt.h"

namespace lockstep {

struct MoveKernels {
  using stream_t = simt::stream_t;
  using error_t = simt::error_t;

  error_t (*write_bytes)(stream_t, std::uint8_t* data, int first, int count);
  error_t (*copy16)(stream_t, void* dst, const void* src, int vectors);
  error_t (*copy_values)(stream_t, std::uint16_t* dst, const std::uint16_t* src, int count);
  error_t (*copy_by_memcpy)(stream_t, void* dst, const void* src, int bytes);
  error_t (*load_by_memcpy)(stream_t, const void* src, unsigned* out);
  error_t (*read_copy_read)(stream_t, int* data, const int* other, int* out);  // by one thread
  error_t (*hash_any)(stream_t, const std::uint32_t* data, unsigned* out, int count);
};
SIMT_DECLARE_IN_VARIANTS(extern const MoveKernels move_kernels;)

}  // namespace lockstep
