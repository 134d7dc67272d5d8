#include "tests/cuda_backend/simt_kernels/synchronisation.h"

namespace lockstep {
namespace SIMT_VARIANT {
namespace {

using simt::stream_t;

constexpr unsigned kAll = 0xffffffffu;

__global__ void lanes_kernel(const float* in, LaneResults* out) {
  const unsigned thread = threadIdx.x;
  const float x = in[thread];
  const int i = static_cast<int>(x);
  LaneResults r{};
  r.sum = simt::warp_sum(x);
  r.max = simt::warp_max(x);
  r.integer_sum = simt::warp_sum(i);
  r.from_lane_3 = __shfl_sync(kAll, x, 3);
  r.from_xor_5 = __shfl_xor_sync(kAll, x, 5);
  r.from_up_2 = __shfl_up_sync(kAll, x, 2u);
  r.from_down_2 = __shfl_down_sync(kAll, x, 2u);
  r.from_segment = __shfl_sync(kAll, x, 1, 8);
  r.ballot = __ballot_sync(kAll, i % 3 == 0);
  r.any = __any_sync(kAll, x > 1e9f);
  r.all = __all_sync(kAll, x < 1e9f);
  out[thread] = r;
}

__global__ void half_warps_kernel(int* out) {
  const unsigned half = threadIdx.x / 16;
  const unsigned mask = half == 0 ? 0x0000ffffu : 0xffff0000u;
  int value = static_cast<int>(threadIdx.x);
  for (int offset = 8; offset > 0; offset /= 2) value += __shfl_xor_sync(mask, value, offset);
  out[threadIdx.x] = value;
}

__global__ void barriers_kernel(const int* in, BarrierResults* out) {
  const unsigned i = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  const unsigned count = blockDim.x * blockDim.y * blockDim.z;
  SIMT_SHARED_ARRAY(int, tile, 1024);
  tile[i] = in[i];
  __syncthreads();
  BarrierResults r{};
  r.neighbour = tile[(i + 1) % count];
  r.x = threadIdx.x;
  r.y = threadIdx.y;
  r.z = threadIdx.z;
  out[i] = r;
}

__global__ void warp_exchange_kernel(const int* in, int* out, bool synced) {
  SIMT_SHARED_ARRAY(int, tile, 64);
  tile[threadIdx.x] = in[threadIdx.x];
  if (synced) __syncwarp();
  out[threadIdx.x] = tile[threadIdx.x ^ 1];
}

__global__ void all_atomics_kernel(unsigned* results, float* sum) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  atomicAdd(results + 0, 1u);
  atomicMax(results + 1, i);
  atomicMin(results + 2, i);
  atomicOr(results + 3, 1u << (i % 32));
  atomicXor(results + 4, i);
  unsigned seen = 0, expected = 0;
  do {
    expected = seen;
    seen = atomicCAS(results + 5, expected, expected + 2);
  } while (seen != expected);
  atomicAdd(sum, 0.5f);
  atomicAdd(reinterpret_cast<unsigned long long*>(results + 6), 0x100000001ull);
}

#if !SIMT_ON_GPU
__global__ void atomic_ref_kernel(int* counter, int* out, bool plain_read) {
  __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED);
  int seen = __atomic_load_n(counter, __ATOMIC_ACQUIRE);
  while (!__atomic_compare_exchange_n(counter, &seen, seen + 1, true, __ATOMIC_RELAXED,
                                      __ATOMIC_RELAXED)) {
  }
  out[threadIdx.x] = plain_read ? *counter : seen;
}
#endif

__global__ void nothing_kernel() {}

}  // namespace

const MeetingKernels meeting_kernels = {
    .lanes =
        [](stream_t s, const float* in, LaneResults* out, int warps) {
          const simt::LaunchConfig config{dim3(1), dim3(static_cast<unsigned>(warps) * 32), 0, s,
                                          "lanes"};
          return simt::launch(config, lanes_kernel, in, out);
        },
    .half_warps =
        [](stream_t s, int* out) {
          return simt::launch({dim3(1), dim3(32), 0, s, "half_warps"}, half_warps_kernel, out);
        },
    .barriers =
        [](stream_t s, const int* in, BarrierResults* out, unsigned x, unsigned y, unsigned z) {
          return simt::launch({dim3(1), dim3(x, y, z), 0, s, "barriers"}, barriers_kernel, in, out);
        },
    .warp_exchange =
        [](stream_t s, const int* in, int* out, bool synced) {
          return simt::launch({dim3(1), dim3(64), 0, s, "warp_exchange"}, warp_exchange_kernel, in,
                              out, synced);
        },
    .all_atomics =
        [](stream_t s, unsigned* results, float* sum, int threads) {
          const simt::LaunchConfig config{dim3(static_cast<unsigned>(threads) / 64), dim3(64), 0, s,
                                          "all_atomics"};
          return simt::launch(config, all_atomics_kernel, results, sum);
        },
    .atomic_ref =
#if SIMT_ON_GPU
        nullptr,
#else
        [](stream_t s, int* counter, int* out, bool plain_read) {
          return simt::launch({dim3(1), dim3(64), 0, s, "atomic_ref"}, atomic_ref_kernel, counter,
                              out, plain_read);
        },
#endif
    .nothing =
        [](const simt::LaunchConfig& config) { return simt::launch(config, nothing_kernel); },
};

}  // namespace SIMT_VARIANT
}  // namespace lockstep
