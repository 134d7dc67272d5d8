#include "tests/benchmarks/simt_benchmark_kernels.h"

namespace lockstep {
namespace SIMT_VARIANT {
namespace {

constexpr int kThreads = 256;

__global__ void nothing_kernel() {}

__global__ void write_rows_vec16_kernel(WriteRowsParams p) {
  const std::int64_t token = blockIdx.x;
  const std::int64_t slot = p.slot_mapping[token];
  if (slot < 0) return;
  const std::int64_t to = slot / p.block_size * p.block_stride + slot % p.block_size * p.row;
  for (std::int64_t i = threadIdx.x * 8; i < p.row; i += blockDim.x * 8) {
    const auto k = *reinterpret_cast<const simt::vec16*>(p.key + token * p.row + i);
    const auto v = *reinterpret_cast<const simt::vec16*>(p.value + token * p.row + i);
    *reinterpret_cast<simt::vec16*>(p.key_cache + to + i) = k;
    *reinterpret_cast<simt::vec16*>(p.value_cache + to + i) = v;
  }
}

__global__ void write_rows_scalar_kernel(WriteRowsParams p) {
  const std::int64_t token = blockIdx.x;
  const std::int64_t slot = p.slot_mapping[token];
  if (slot < 0) return;
  const std::int64_t to = slot / p.block_size * p.block_stride + slot % p.block_size * p.row;
  for (std::int64_t i = threadIdx.x; i < p.row; i += blockDim.x) {
    p.key_cache[to + i] = p.key[token * p.row + i];
    p.value_cache[to + i] = p.value[token * p.row + i];
  }
}

__device__ float sum_of_column_shares(const float* row, int columns) {
  float sum = 0;
  for (int i = static_cast<int>(threadIdx.x); i < columns; i += kThreads) sum += row[i];
  return sum;
}

__device__ float warp_sum_by_shuffles(float value) {
  for (int offset = 16; offset > 0; offset >>= 1)
    value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}

template <bool kWarpSum>
__global__ void sum_rows_kernel(const float* in, float* out, int columns) {
  SIMT_SHARED_ARRAY(float, parts, kThreads / 32);
  const auto sum = [](float v) { return kWarpSum ? simt::warp_sum(v) : warp_sum_by_shuffles(v); };
  const float mine = sum(sum_of_column_shares(in + std::int64_t(blockIdx.x) * columns, columns));
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = mine;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  const float all = sum(threadIdx.x < kThreads / 32 ? parts[threadIdx.x] : 0.0f);
  if (threadIdx.x == 0) out[blockIdx.x] = all;
}

__global__ void sum_rows_tree_kernel(const float* in, float* out, int columns) {
  SIMT_DYNAMIC_SHARED(float, parts);
  parts[threadIdx.x] = sum_of_column_shares(in + std::int64_t(blockIdx.x) * columns, columns);
  __syncthreads();
  for (unsigned half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) parts[threadIdx.x] += parts[threadIdx.x + half];
    __syncthreads();
  }
  if (threadIdx.x == 0) out[blockIdx.x] = parts[0];
}

simt::LaunchConfig grid(simt::stream_t stream, std::int64_t ctas, unsigned threads,
                        const char* name) {
  return {dim3(static_cast<unsigned>(ctas)), dim3(threads), 0, stream, name};
}

}  // namespace

simt::error_t nothing(simt::stream_t stream) {
  return simt::launch(grid(stream, 1, 32, "nothing"), nothing_kernel);
}
simt::error_t write_rows_vec16(simt::stream_t stream, const WriteRowsParams& p) {
  return simt::launch(grid(stream, p.num_tokens, 128, "write_rows_vec16"), write_rows_vec16_kernel,
                      p);
}
simt::error_t write_rows_scalar(simt::stream_t stream, const WriteRowsParams& p) {
  return simt::launch(grid(stream, p.num_tokens, 256, "write_rows_scalar"),
                      write_rows_scalar_kernel, p);
}
simt::error_t sum_rows_shuffles(simt::stream_t stream, const float* in, float* out, int rows,
                                int columns) {
  return simt::launch(grid(stream, rows, kThreads, "sum_rows_shuffles"), sum_rows_kernel<false>, in,
                      out, columns);
}
simt::error_t sum_rows_warp_sum(simt::stream_t stream, const float* in, float* out, int rows,
                                int columns) {
  return simt::launch(grid(stream, rows, kThreads, "sum_rows_warp_sum"), sum_rows_kernel<true>, in,
                      out, columns);
}
simt::error_t sum_rows_tree(simt::stream_t stream, const float* in, float* out, int rows,
                            int columns) {
  simt::LaunchConfig config = grid(stream, rows, kThreads, "sum_rows_tree");
  config.smem = kThreads * sizeof(float);
  return simt::launch(config, sum_rows_tree_kernel, in, out, columns);
}

const BenchmarkKernels benchmark_kernels = {nothing,           write_rows_vec16,  write_rows_scalar,
                                            sum_rows_shuffles, sum_rows_warp_sum, sum_rows_tree};

}  // namespace SIMT_VARIANT
}  // namespace lockstep
