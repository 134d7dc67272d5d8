// Kernels with one planted bug each, and right ones that must not be reported.
#pragma once

#include <cstdint>

#include "cuda_backend/simt/simt.h"

namespace lockstep {

enum class Meet { not_at_all, in_warp, in_cta };

struct BugKernels {
  using stream_t = simt::stream_t;
  using error_t = simt::error_t;

  // Bounds, alignment, definedness.
  error_t (*fill)(stream_t, float* data, int count);  // right
  error_t (*fill_one_too_many)(stream_t, float* data, int count);
  error_t (*copy_floats)(stream_t, const float* in, float* out, int count);
  error_t (*store_pairs)(stream_t, float* data, int first, int pairs);  // 8-byte stores
  error_t (*write_block_int32)(stream_t, const std::int32_t* table, float* pool,
                               std::int32_t stride,
                               int blocks);  // block * stride in 32 bits
  error_t (*write_block_int64)(stream_t, const std::int32_t* table, float* pool,
                               std::int64_t stride, int blocks);
  error_t (*fill_bytes)(stream_t, std::uint8_t* data, int count);  // every byte by another thread

  // Order between threads.
  error_t (*sum)(stream_t, const float* in, float* out, int count, bool with_barrier);
  error_t (*count_up)(stream_t, int* counter, bool atomic, int ctas);
  error_t (*count_up_alone)(stream_t, int* counter, int ctas);  // one thread each, not atomic
  error_t (*write_rows)(stream_t, const std::int64_t* slots, float* cache, int rows, int width);
  error_t (*shift_left)(stream_t, std::uint16_t* state, int inner, int width, int by, bool ordered);
  error_t (*last_cta_sums)(stream_t, float* parts, unsigned* done, float* out, int ctas,
                           bool fence);
  // Every reader reads *data, meets the others or not, and reader 0 writes it. ctas == 2: one
  // thread each; else one CTA with readers at threads 0 and `distance`.
  error_t (*read_then_write)(stream_t, int* data, int* out, int ctas, int distance, Meet meet);
  // Two CTAs read each other's part before the atomic that would order them.
  error_t (*peek_before_acquire)(stream_t, float* parts, unsigned* done);
  // Three CTAs of 64 threads; the middle one may leave out its last barrier.
  error_t (*ping_pong)(stream_t, int* out, int rounds, bool skip_last_barrier);
  error_t (*ping_pong_in_warp)(stream_t, int* out,
                               int rounds);  // by __syncwarp; a second warp idles

  // Synchronisation.
  error_t (*barrier_in_branch)(stream_t, float* data);  // two barriers that face each other
  // In every third CTA some wait at a barrier, some at a shuffle. 32 floats a CTA.
  error_t (*barrier_never_met)(stream_t, float* data, int ctas);
  // Lanes 16 to 31 exit; the others shuffle from a lane, or sum.
  error_t (*shuffle_with_exited_lanes)(stream_t, int* data, int source);
  error_t (*sum_with_exited_lanes)(stream_t, int* data);

  // Shared memory.
  error_t (*shared_uninitialised)(stream_t, float* out);
  error_t (*shared_out_of_bounds)(stream_t, float* out, int index);
  // Eight floats of dynamic shared memory; only this store writes the sixth.
  error_t (*dynamic_shared)(stream_t, float* out, int index);

  error_t (*shared_too_large)(stream_t,
                              float* out);  // null under nvcc, which refuses to compile it

  // One thread with 400 KiB of locals, written from the top down.
  error_t (*deep_stack)(stream_t, int* out);

  // Addresses.
  error_t (*read_through)(stream_t, const float* const* pointer, float* out);
  error_t (*spin)(stream_t, const int* flag, int* out);

  // CTAs that wait for each other.
  error_t (*relay)(stream_t, unsigned* turn, int* sums, int ctas, bool fence);
  error_t (*grid_barrier)(stream_t, unsigned* arrived, int* passed, int ctas);
};
SIMT_DECLARE_IN_VARIANTS(extern const BugKernels bug_kernels;)

}  // namespace lockstep
