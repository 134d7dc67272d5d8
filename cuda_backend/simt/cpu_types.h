// The built-in types and error values of CUDA that kernels use, for g++: with nvcc's names, sizes
// and alignments.
#pragma once

#include <cstddef>
#include <cstdint>

struct uint3 {
  unsigned x, y, z;
};
struct alignas(8) float2 {
  float x, y;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

namespace simt {

class Executor;
using stream_t = Executor*;  // the executor that runs the launch, in order

enum class error_t : int { success, invalid_value, invalid_configuration, out_of_memory };
inline constexpr error_t success = error_t::success;
inline constexpr error_t invalid_value = error_t::invalid_value;
inline constexpr error_t invalid_configuration = error_t::invalid_configuration;
inline constexpr error_t out_of_memory = error_t::out_of_memory;
const char* error_string(error_t error);

struct LaunchConfig {
  dim3 grid;
  dim3 block;
  std::size_t smem = 0;  // bytes of dynamic shared memory
  stream_t stream = nullptr;
  const char* name = "";      // in reports and statistics
  bool large_shared = false;  // opts in to more than 48 KiB of shared memory, as on a GPU
};

}  // namespace simt
