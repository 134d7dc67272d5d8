// All launchers of the backend in tables, so that host code is the same for every build of the
// kernels: simt_fast and simt_checked on the CPU, simt_cuda on a GPU.
//
// 1. A launcher computes the grid, selects the instance (access width) and launches. With nothing
//    to do it launches nothing.
// 2. It returns 0 or the platform's error, which error_text() describes. It does not wait.
// 3. It refuses shapes that a grid cannot express.
// Not checked: what the parameters point to.
#pragma once

#include <cstdint>

#include "cuda_backend/kernels/engine_params.h"
#include "cuda_backend/kernels/params.h"
#include "cuda_backend/simt/simt.h"

namespace lockstep::cuda {

// The stream and shape of launches. A CPU has other shapes: a thread there costs as much as moving
// twenty bytes.
struct LaunchPlace {
  void* stream = nullptr;
  std::uint32_t cta_threads = 256;
  std::uint32_t items_per_thread = 1;    // moves
  std::uint32_t items_per_reducer = 16;  // sums
  bool whole_warps = true;               // sums reduce over warps; CTAs are multiples of 32
};

template <class Params>
using Launcher = int (*)(const LaunchPlace& place, const Params& params);

// X(name, its parameters): the kernels that follow the protocol.
#define LOCKSTEP_PROTOCOL_KERNELS(X)                                \
  X(clear_rows, TableClearParams)                                   \
  X(append_entries, TableAppendParams)                              \
  X(edit_entries, TableEditParams)                                  \
  X(slot_mapping, SlotMappingParams)                                \
  X(draft_slots, DraftSlotsParams)                                  \
  X(fill_rows, FillRowsParams)                                      \
  X(gather_rows, GatherRowsParams)                                  \
  X(zero_blocks, ZeroBlocksParams)                                  \
  X(copy_blocks, CopyBlocksParams) /* with the host tier as well */ \
  X(poison_blocks, PoisonBlocksParams)                              \
  X(fingerprint_pages, FingerprintParams)                           \
  X(attention_digest, DigestParams)                                 \
  X(update_states, StateUpdateParams)                               \
  X(mirror_rows, MirrorRowsParams)                                  \
  X(clear_regions, ClearRegionsParams)                              \
  X(hot_reads, HotReadParams)                                       \
  X(swap_rows, SwapRowsParams)

// X(name, its parameters): the kernels of a serving engine. Cache writes and attention also run in
// replays of words; the others compute real numbers. The promises of KernelTable hold.
// docs/kernels.md lists shapes, oracles and tolerances.
#define LOCKSTEP_ENGINE_KERNELS(X)                                                   \
  X(write_parts, WritePartsParams)                                                   \
  X(split_attention, SplitAttentionParams) /* with the joining of its splits */      \
  X(causal_conv1d, ConvParams)                                                       \
  X(selective_state, SelectiveStateParams)                                           \
  X(selective_chunks, SelectiveStateParams) /* the same function, for many tokens */ \
  X(gated_delta, GatedDeltaParams)                                                   \
  X(delta_chunks, GatedDeltaParams) /* the same function, for many tokens */         \
  X(move_bytes, MoveBytesParams)

#define LOCKSTEP_LAUNCHER_MEMBER(name, Params) Launcher<Params> name;
struct KernelTable {
  LOCKSTEP_PROTOCOL_KERNELS(LOCKSTEP_LAUNCHER_MEMBER)
  const char* (*error_text)(int error);
};
struct EngineKernels {
  LOCKSTEP_ENGINE_KERNELS(LOCKSTEP_LAUNCHER_MEMBER)
};
#undef LOCKSTEP_LAUNCHER_MEMBER

SIMT_DECLARE_IN_VARIANTS(extern const KernelTable kernel_table;
                         extern const EngineKernels engine_kernels;)

}  // namespace lockstep::cuda
