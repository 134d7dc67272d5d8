// Kernels with every way of synchronisation: warp reductions, shuffles, votes, barriers with
// predicates.
#pragma once

#include <cstdint>

#include "cuda_backend/simt/simt.h"

namespace lockstep {

// What each lane saw, for the host to compare with loops.
struct LaneResults {
  float sum, max;
  int integer_sum;
  float from_lane_3, from_xor_5, from_up_2, from_down_2, from_segment;
  unsigned ballot;
  int any, all;
};
struct BarrierResults {
  int neighbour;  // what the next thread left in shared memory before the barrier
  unsigned x, y, z;
};

struct MeetingKernels {
  using stream_t = simt::stream_t;
  using error_t = simt::error_t;

  error_t (*lanes)(stream_t, const float* in, LaneResults* out, int warps);
  error_t (*half_warps)(stream_t, int* out);  // each half meets under its own mask
  error_t (*barriers)(stream_t, const int* in, BarrierResults* out, unsigned x, unsigned y,
                      unsigned z);
  error_t (*warp_exchange)(stream_t, const int* in, int* out,
                           bool synced);  // through shared memory
  error_t (*all_atomics)(stream_t, unsigned* results, float* sum, int threads);
  // The same counter by g++'s own atomics, or with one plain read of it among them. Null under
  // nvcc, which spells them in another way.
  error_t (*atomic_ref)(stream_t, int* counter, int* out, bool plain_read);
  error_t (*nothing)(const simt::LaunchConfig& config);
};
SIMT_DECLARE_IN_VARIANTS(extern const MeetingKernels meeting_kernels;)

}  // namespace lockstep
