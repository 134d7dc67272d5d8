#include "tests/cuda_backend/simt_kernels/moves.h"

namespace lockstep {
namespace SIMT_VARIANT {
namespace {

using simt::stream_t;

__global__ void write_bytes_kernel(std::uint8_t* data, int first, int count) {
  for (int i = static_cast<int>(threadIdx.x); i < count; i += 32) data[first + i] = 7;
}
__global__ void copy16_kernel(void* dst, const void* src, int vectors) {
  const int i = static_cast<int>(threadIdx.x);
  if (i < vectors)
    simt::copy16(static_cast<simt::vec16*>(dst) + i, static_cast<const simt::vec16*>(src) + i);
}
__global__ void copy_values_kernel(std::uint16_t* dst, const std::uint16_t* src, int count) {
  for (int i = static_cast<int>(threadIdx.x); i < count; i += 32)
    simt::copy_value(dst + i, src + i);
}
__global__ void copy_by_memcpy_kernel(void* dst, const void* src, int bytes) {
  if (threadIdx.x == 0) memcpy(dst, src, static_cast<std::size_t>(bytes));
}
__global__ void load_by_memcpy_kernel(const void* src, unsigned* out) {
  unsigned word = 0;
  memcpy(&word, src, sizeof(word));
  out[threadIdx.x] = word;
}
__global__ void read_copy_read_kernel(int* data, const int* other, int* out) {
  out[0] = *data;
  simt::copy_value(data, other);
  out[1] = *data;
}
__global__ void hash_any_kernel(const std::uint32_t* data, unsigned* out, int count) {
  unsigned hash = 0;
  for (int i = 0; i < count; ++i) hash = hash * 31 + simt::load_any(data + i);
  *out = hash;
}
simt::LaunchConfig warp(stream_t stream, unsigned threads, const char* name) {
  return {dim3(1), dim3(threads), 0, stream, name};
}

}  // namespace

const MoveKernels move_kernels = {
    .write_bytes =
        [](stream_t s, std::uint8_t* data, int first, int count) {
          return simt::launch(warp(s, 32, "write_bytes"), write_bytes_kernel, data, first, count);
        },
    .copy16 =
        [](stream_t s, void* dst, const void* src, int vectors) {
          return simt::launch(warp(s, 32, "copy16"), copy16_kernel, dst, src, vectors);
        },
    .copy_values =
        [](stream_t s, std::uint16_t* dst, const std::uint16_t* src, int count) {
          return simt::launch(warp(s, 32, "copy_values"), copy_values_kernel, dst, src, count);
        },
    .copy_by_memcpy =
        [](stream_t s, void* dst, const void* src, int bytes) {
          return simt::launch(warp(s, 32, "copy_by_memcpy"), copy_by_memcpy_kernel, dst, src,
                              bytes);
        },
    .load_by_memcpy =
        [](stream_t s, const void* src, unsigned* out) {
          return simt::launch(warp(s, 1, "load_by_memcpy"), load_by_memcpy_kernel, src, out);
        },
    .read_copy_read =
        [](stream_t s, int* data, const int* other, int* out) {
          return simt::launch(warp(s, 1, "read_copy_read"), read_copy_read_kernel, data, other,
                              out);
        },
    .hash_any =
        [](stream_t s, const std::uint32_t* data, unsigned* out, int count) {
          return simt::launch(warp(s, 1, "hash_any"), hash_any_kernel, data, out, count);
        },
};

}  // namespace SIMT_VARIANT
}  // namespace lockstep
