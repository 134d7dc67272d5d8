#include "tests/cuda_backend/simt_kernels/bugs.h"

namespace lockstep {
namespace SIMT_VARIANT {
namespace {

using simt::error_t;
using simt::stream_t;

constexpr int kThreads = 128;

__device__ int global_thread() { return static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); }

simt::LaunchConfig items(stream_t stream, int count, const char* name) {
  return {dim3(static_cast<unsigned>((count + kThreads - 1) / kThreads)), dim3(kThreads), 0, stream,
          name};
}
simt::LaunchConfig ctas(stream_t stream, int count, unsigned threads, const char* name) {
  return {dim3(static_cast<unsigned>(count)), dim3(threads), 0, stream, name};
}

// ---- bounds, alignment, definedness

__global__ void fill_kernel(float* data, int count) {
  if (global_thread() < count) data[global_thread()] = 1.0f;
}
__global__ void fill_one_too_many_kernel(float* data, int count) {
  if (global_thread() <= count) data[global_thread()] = 1.0f;
}
__global__ void copy_floats_kernel(const float* in, float* out, int count) {
  if (global_thread() < count) out[global_thread()] = in[global_thread()];
}
__global__ void store_pairs_kernel(float* data, int first, int pairs) {
  if (global_thread() < pairs)
    reinterpret_cast<float2*>(data + first)[global_thread()] = float2{1.0f, 2.0f};
}
__global__ void write_block_int32_kernel(const std::int32_t* table, float* pool,
                                         std::int32_t stride) {
  // What a product of two ints does on the GPU, without the undefined behaviour here.
  const auto offset = static_cast<std::int32_t>(static_cast<std::uint32_t>(table[blockIdx.x]) *
                                                static_cast<std::uint32_t>(stride));
  pool[static_cast<std::int64_t>(offset) + threadIdx.x] = 1.0f;
}
__global__ void write_block_int64_kernel(const std::int32_t* table, float* pool,
                                         std::int64_t stride) {
  pool[table[blockIdx.x] * stride + threadIdx.x] = 1.0f;
}
__global__ void fill_bytes_kernel(std::uint8_t* data, int count) {
  if (global_thread() < count) data[global_thread()] = static_cast<std::uint8_t>(global_thread());
}

// ---- order between threads

__global__ void sum_kernel(const float* in, float* out, int count, bool with_barrier) {
  SIMT_SHARED_ARRAY(float, parts, kThreads / 32);
  float mine = 0;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) mine += in[i];
  mine = simt::warp_sum(mine);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = mine;
  if (with_barrier) __syncthreads();
  if (threadIdx.x == 0) out[0] = parts[0] + parts[1] + parts[2] + parts[3];
}
__global__ void count_up_kernel(int* counter, bool atomic) {
  if (atomic)
    atomicAdd(counter, 1);
  else
    counter[0] = counter[0] + 1;
}
__global__ void write_rows_kernel(const std::int64_t* slots, float* cache, int width) {
  const std::int64_t slot = slots[blockIdx.x];
  if (slot < 0) return;
  for (int i = static_cast<int>(threadIdx.x); i < width; i += 32) cache[slot * width + i] = 1.0f;
}
// A convolution state [width, inner] moves left by some tokens inside its own block.
__global__ void shift_left_kernel(std::uint16_t* state, int inner, int width, int by) {
  const int count = (width - by) * inner;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += 32) state[i] = state[i + by * inner];
}
__global__ void shift_left_ordered_kernel(std::uint16_t* state, int inner, int width, int by) {
  for (int token = 0; token < width - by; ++token)
    for (int i = static_cast<int>(threadIdx.x); i < inner; i += 32)
      state[token * inner + i] = state[(token + by) * inner + i];
}
__global__ void last_cta_sums_kernel(float* parts, unsigned* done, float* out, bool fence) {
  SIMT_SHARED_ARRAY(bool, is_last, 1);
  if (threadIdx.x == 0) {
    parts[blockIdx.x] = static_cast<float>(blockIdx.x);
    if (fence) __threadfence();
    is_last[0] = atomicAdd(done, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (!is_last[0]) return;
  const float all = simt::warp_sum(threadIdx.x < gridDim.x ? parts[threadIdx.x] : 0.0f);
  if (threadIdx.x == 0) out[0] = all;
}
__global__ void read_then_write_kernel(int* data, int* out, int distance, Meet meet) {
  const int i = global_thread();
  if (i % distance == 0) out[i] = *data;
  if (meet == Meet::in_warp) __syncwarp();
  if (meet == Meet::in_cta) __syncthreads();
  if (i == 0) *data = 1;
}
__global__ void peek_before_acquire_kernel(float* parts, unsigned* done) {
  const float other = parts[1 - blockIdx.x];
  parts[blockIdx.x] = other + 1.0f;
  __threadfence();
  atomicAdd(done, 1u);
}
// Two buffers change hands at every barrier, far more often than a stamp has epochs.
__global__ void ping_pong_kernel(int* out, int rounds, bool skip_last_barrier) {
  SIMT_SHARED_ARRAY(int, buffers, 128);
  buffers[threadIdx.x] = static_cast<int>(threadIdx.x);
  __syncthreads();
  for (int round = 0; round < rounds; ++round) {
    const unsigned from = round % 2 == 0 ? 0 : 64;
    buffers[64 - from + threadIdx.x] = buffers[from + (threadIdx.x + 1) % 64] + 1;
    if (round + 1 < rounds || !skip_last_barrier || blockIdx.x != 1) __syncthreads();
  }
  out[global_thread()] = buffers[(rounds % 2 == 0 ? 0 : 64) + 63 - threadIdx.x];
}

__global__ void ping_pong_in_warp_kernel(int* out, int rounds) {
  SIMT_SHARED_ARRAY(int, buffers, 64);
  if (threadIdx.x < 32) {
    buffers[threadIdx.x] = static_cast<int>(threadIdx.x);
    __syncwarp();
    for (int round = 0; round < rounds; ++round) {
      const unsigned from = round % 2 == 0 ? 0 : 32;
      buffers[32 - from + threadIdx.x] = buffers[from + (threadIdx.x + 1) % 32] + 1;
      __syncwarp();
    }
  }
  __syncthreads();
  if (threadIdx.x >= 32) out[threadIdx.x - 32] = buffers[threadIdx.x - 32];
}

// ---- synchronisation

__global__ void barrier_in_branch_kernel(float* data) {
  if (threadIdx.x < 7) {
    data[threadIdx.x] = 1.0f;
    __syncthreads();
  } else {
    data[threadIdx.x] = 2.0f;
    __syncthreads();
  }
}
__global__ void barrier_never_met_kernel(float* data) {
  if (blockIdx.x % 3 == 0 && threadIdx.x < 7) __syncthreads();
  data[blockIdx.x * 32 + threadIdx.x] = simt::warp_sum(1.0f);
}
__global__ void shuffle_with_exited_lanes_kernel(int* data, int source) {
  if (threadIdx.x >= 16) return;
  data[threadIdx.x] = __shfl_sync(0xffffffffu, 1, source);
}
__global__ void sum_with_exited_lanes_kernel(int* data) {
  if (threadIdx.x >= 16) return;
  data[threadIdx.x] = simt::warp_sum(1);
}

// ---- shared memory

__global__ void shared_uninitialised_kernel(float* out) {
  SIMT_SHARED_ARRAY(float, tile, 32);
  if (threadIdx.x != 5) tile[threadIdx.x] = 1.0f;
  __syncthreads();
  out[threadIdx.x] = tile[threadIdx.x];
}
__global__ void shared_out_of_bounds_kernel(float* out, int index) {
  SIMT_SHARED_ARRAY(float, tile, 8);
  SIMT_SHARED_ARRAY(float, behind, 8);
  if (threadIdx.x == 0) {
    behind[0] = 0.0f;
    tile[index] = 1.0f;
  }
  __syncthreads();
  if (threadIdx.x == 1) out[0] = index < 0 ? tile[0] : behind[0];
}

__global__ void dynamic_shared_kernel(float* out, int index) {
  SIMT_DYNAMIC_SHARED(float, tile);
  if (threadIdx.x != 5) tile[threadIdx.x] = 1.0f;
  if (threadIdx.x == 0) tile[index] = 2.0f;
  __syncthreads();
  out[threadIdx.x] = tile[threadIdx.x];
}
__global__ void deep_stack_kernel(int* out) {
  constexpr int kInts = 100 << 10;
  volatile int locals[kInts];
  for (int i = kInts - 1; i >= 0; i -= 256) locals[i] = i;
  *out = locals[kInts - 1];
}

#if !SIMT_ON_GPU
__global__ void shared_too_large_kernel(float* out) {
  SIMT_SHARED_ARRAY(float, small, 32);
  small[threadIdx.x] = 1.0f;
  out[threadIdx.x] = small[threadIdx.x];
  SIMT_SHARED_ARRAY(float, large, 60000);
  large[threadIdx.x] = 2.0f;
  out[threadIdx.x] = large[threadIdx.x];
}
#endif

// ---- addresses

__global__ void read_through_kernel(const float* const* pointer, float* out) { *out = **pointer; }
__global__ void spin_kernel(const int* flag, int* out) {
  while (atomicAdd(const_cast<int*>(flag), 0) == 0) {
  }
  *out = 1;
}
// Each CTA waits for its turn, and adds to what the one before it has left.
__global__ void relay_kernel(unsigned* turn, int* sums, bool fence) {
  while (atomicAdd(turn, 0u) != blockIdx.x) {
  }
  sums[blockIdx.x] = blockIdx.x == 0 ? 1 : sums[blockIdx.x - 1] + 1;
  if (fence) __threadfence();
  atomicAdd(turn, 1u);
}
__global__ void grid_barrier_kernel(unsigned* arrived, int* passed) {
  atomicAdd(arrived, 1u);
  while (atomicAdd(arrived, 0u) < gridDim.x) {
  }
  atomicAdd(passed, 1);
}

}  // namespace

const BugKernels bug_kernels = {
    .fill =
        [](stream_t s, float* data, int count) {
          return simt::launch(items(s, count, "fill"), fill_kernel, data, count);
        },
    .fill_one_too_many =
        [](stream_t s, float* data, int count) {
          return simt::launch(items(s, count + 1, "fill_one_too_many"), fill_one_too_many_kernel,
                              data, count);
        },
    .copy_floats =
        [](stream_t s, const float* in, float* out, int count) {
          return simt::launch(items(s, count, "copy_floats"), copy_floats_kernel, in, out, count);
        },
    .store_pairs =
        [](stream_t s, float* data, int first, int pairs) {
          return simt::launch(items(s, pairs, "store_pairs"), store_pairs_kernel, data, first,
                              pairs);
        },
    .write_block_int32 =
        [](stream_t s, const std::int32_t* table, float* pool, std::int32_t stride, int blocks) {
          return simt::launch(ctas(s, blocks, 32, "write_block_int32"), write_block_int32_kernel,
                              table, pool, stride);
        },
    .write_block_int64 =
        [](stream_t s, const std::int32_t* table, float* pool, std::int64_t stride, int blocks) {
          return simt::launch(ctas(s, blocks, 32, "write_block_int64"), write_block_int64_kernel,
                              table, pool, stride);
        },
    .fill_bytes =
        [](stream_t s, std::uint8_t* data, int count) {
          return simt::launch(items(s, count, "fill_bytes"), fill_bytes_kernel, data, count);
        },
    .sum =
        [](stream_t s, const float* in, float* out, int count, bool with_barrier) {
          return simt::launch(ctas(s, 1, kThreads, "sum"), sum_kernel, in, out, count,
                              with_barrier);
        },
    .count_up =
        [](stream_t s, int* counter, bool atomic, int count) {
          return simt::launch(ctas(s, count, 64, "count_up"), count_up_kernel, counter, atomic);
        },
    .count_up_alone =
        [](stream_t s, int* counter, int count) {
          return simt::launch(ctas(s, count, 1, "count_up_alone"), count_up_kernel, counter, false);
        },
    .write_rows =
        [](stream_t s, const std::int64_t* slots, float* cache, int rows, int width) {
          return simt::launch(ctas(s, rows, 32, "write_rows"), write_rows_kernel, slots, cache,
                              width);
        },
    .shift_left =
        [](stream_t s, std::uint16_t* state, int inner, int width, int by, bool ordered) {
          return simt::launch(ctas(s, 1, 32, "shift_left"),
                              ordered ? shift_left_ordered_kernel : shift_left_kernel, state, inner,
                              width, by);
        },
    .last_cta_sums =
        [](stream_t s, float* parts, unsigned* done, float* out, int count, bool fence) {
          return simt::launch(ctas(s, count, 32, "last_cta_sums"), last_cta_sums_kernel, parts,
                              done, out, fence);
        },
    .read_then_write =
        [](stream_t s, int* data, int* out, int count, int distance, Meet meet) {
          const unsigned threads = count == 2 ? 1 : static_cast<unsigned>((distance / 32 + 1) * 32);
          return simt::launch(ctas(s, count, threads, "read_then_write"), read_then_write_kernel,
                              data, out, distance, meet);
        },
    .peek_before_acquire =
        [](stream_t s, float* parts, unsigned* done) {
          return simt::launch(ctas(s, 2, 1, "peek_before_acquire"), peek_before_acquire_kernel,
                              parts, done);
        },
    .ping_pong =
        [](stream_t s, int* out, int rounds, bool skip_last_barrier) {
          return simt::launch(ctas(s, 3, 64, "ping_pong"), ping_pong_kernel, out, rounds,
                              skip_last_barrier);
        },
    .ping_pong_in_warp =
        [](stream_t s, int* out, int rounds) {
          return simt::launch(ctas(s, 1, 64, "ping_pong_in_warp"), ping_pong_in_warp_kernel, out,
                              rounds);
        },
    .barrier_in_branch =
        [](stream_t s, float* data) {
          return simt::launch(ctas(s, 1, 32, "barrier_in_branch"), barrier_in_branch_kernel, data);
        },
    .barrier_never_met =
        [](stream_t s, float* data, int count) {
          return simt::launch(ctas(s, count, 32, "barrier_never_met"), barrier_never_met_kernel,
                              data);
        },
    .shuffle_with_exited_lanes =
        [](stream_t s, int* data, int source) {
          return simt::launch(ctas(s, 1, 32, "shuffle_with_exited_lanes"),
                              shuffle_with_exited_lanes_kernel, data, source);
        },
    .sum_with_exited_lanes =
        [](stream_t s, int* data) {
          return simt::launch(ctas(s, 1, 32, "sum_with_exited_lanes"), sum_with_exited_lanes_kernel,
                              data);
        },
    .shared_uninitialised =
        [](stream_t s, float* out) {
          return simt::launch(ctas(s, 1, 32, "shared_uninitialised"), shared_uninitialised_kernel,
                              out);
        },
    .shared_out_of_bounds =
        [](stream_t s, float* out, int index) {
          return simt::launch(ctas(s, 1, 32, "shared_out_of_bounds"), shared_out_of_bounds_kernel,
                              out, index);
        },
    .dynamic_shared =
        [](stream_t s, float* out, int index) {
          simt::LaunchConfig config = ctas(s, 1, 8, "dynamic_shared");
          config.smem = 8 * sizeof(float);
          return simt::launch(config, dynamic_shared_kernel, out, index);
        },
    .shared_too_large =
#if SIMT_ON_GPU
        nullptr,
#else
        [](stream_t s, float* out) {
          return simt::launch(ctas(s, 1, 32, "shared_too_large"), shared_too_large_kernel, out);
        },
#endif
    .deep_stack =
        [](stream_t s, int* out) {
          return simt::launch(ctas(s, 1, 1, "deep_stack"), deep_stack_kernel, out);
        },
    .read_through =
        [](stream_t s, const float* const* pointer, float* out) {
          return simt::launch(ctas(s, 1, 1, "read_through"), read_through_kernel, pointer, out);
        },
    .spin = [](stream_t s, const int* flag,
               int* out) { return simt::launch(ctas(s, 1, 1, "spin"), spin_kernel, flag, out); },
    .relay =
        [](stream_t s, unsigned* turn, int* sums, int count, bool fence) {
          return simt::launch(ctas(s, count, 1, "relay"), relay_kernel, turn, sums, fence);
        },
    .grid_barrier =
        [](stream_t s, unsigned* arrived, int* passed, int count) {
          return simt::launch(ctas(s, count, 1, "grid_barrier"), grid_barrier_kernel, arrived,
                              passed);
        },
};

}  // namespace SIMT_VARIANT
}  // namespace lockstep
