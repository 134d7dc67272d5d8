// Every launcher of the backend in one table, so that host code is the same for every build of the
// kernels: simt_fast::kernel_table and simt_checked::kernel_table on the CPU,
// simt_cuda::kernel_table on a GPU.
//
// A launcher works out the grid, picks the instance (access width) and launches;
// with nothing to do it launches nothing. It returns 0 or the platform's error, which error_text()
// puts in words. Launchers do not wait. They check shapes that a grid cannot express, and nothing
// else: what the parameters point to is the caller's word.
#pragma once

#include <cstdint>

#include "cuda_backend/kernels/engine_params.h"
#include "cuda_backend/kernels/params.h"
#include "cuda_backend/simt/simt.h"

namespace lockstep::cuda {

// What a kernel can be made to do wrong itself, for what no parameter expresses: the order of
// accesses within one launch, and numbers that it works out and that lie nowhere before. Launchers
// give it to kernels as a template argument, so that those of a healthy backend carry no trace of
// it. Every other planted defect is outside: cuda_backend/defects/.
enum class KernelDefect : std::uint8_t {
  none,
  write_race,             // write_rows: the first token's row once more, by another CTA
  write_offset_int32,     // write_rows: block times stride in 32 bits
  draft_past_table,       // draft_slots: entries behind a row's length are read
  table_unsplit,          // append_entries, edit_entries: kernel block ids are the manager's
  state_pads_included,    // update_states: the last token advances a state twice
  state_update_race,      // update_states: two threads advance one word
  scale_not_stored,       // write_parts: the scale that was worked out is dropped
  combine_unscaled,       // split_attention: partial softmaxes are added as they are
  chunk_carry_undecayed,  // *_chunks: the state before a piece enters it without its decay
  shift_race,             // move_bytes: an overlapping move in no order
  hot_evicts_used,        // hot_reads: slots that the read uses are handed out
  hot_row_by_slot,        // swap_rows: the host row of the slot's number
};

// Where and in what shape launches run. The same kernels take other shapes on a CPU, where a thread
// costs as much as twenty bytes moved.
struct LaunchPlace {
  void* stream = nullptr;
  std::uint32_t cta_threads = 256;
  std::uint32_t items_per_thread = 1;    // moves
  std::uint32_t items_per_reducer = 16;  // sums
  bool whole_warps = true;               // sums reduce over warps; CTAs are multiples of 32
  KernelDefect defect = KernelDefect::none;
};

template <class Params>
using Launcher = int (*)(const LaunchPlace& place, const Params& params);

// X(name, its parameters): the kernels that follow the protocol.
#define LOCKSTEP_PROTOCOL_KERNELS(X)                                       \
  X(clear_rows, TableClearParams)                                          \
  X(append_entries, TableAppendParams)                                     \
  X(edit_entries, TableEditParams)                                         \
  X(slot_mapping, SlotMappingParams)                                       \
  X(draft_slots, DraftSlotsParams)                                         \
  X(fill_rows, FillRowsParams)                                             \
  X(write_rows, WriteRowsParams)                                           \
  X(gather_rows, GatherRowsParams)                                         \
  X(zero_blocks, ZeroBlocksParams)                                         \
  X(copy_blocks, CopyBlocksParams)                                         \
  X(copy_pages, CopyPagesParams) /* between the cache and the host tier */ \
  X(poison_blocks, PoisonBlocksParams)                                     \
  X(fingerprint_pages, FingerprintParams)                                  \
  X(attention_digest, DigestParams)                                        \
  X(fill_queries, AttentionParams)                                         \
  X(paged_attention, AttentionParams)                                      \
  X(update_states, StateUpdateParams)                                      \
  X(mirror_rows, MirrorRowsParams)                                         \
  X(clear_regions, ClearRegionsParams)                                     \
  X(hot_reads, HotReadParams)                                              \
  X(swap_rows, SwapRowsParams)

// Launchers of the kernels that a serving engine runs on real numbers: cache writes with
// quantisation, split attention, convolutions, recurrences, state and page moves, slots and block
// tables of a batch. A table of each build, beside the one whose kernels follow the protocol of
// sim/protocol/backend.h; the same promises hold. docs/kernels.md lists shapes, oracles and
// tolerances.
#define LOCKSTEP_ENGINE_KERNELS(X)                                                   \
  X(write_parts, WritePartsParams)                                                   \
  X(split_attention, SplitAttentionParams) /* with the joining of its splits */      \
  X(causal_conv1d, ConvParams)                                                       \
  X(selective_state, SelectiveStateParams)                                           \
  X(selective_chunks, SelectiveStateParams) /* the same function, for many tokens */ \
  X(gated_delta, GatedDeltaParams)                                                   \
  X(delta_chunks, GatedDeltaParams) /* the same function, for many tokens */         \
  X(move_bytes, MoveBytesParams)                                                     \
  X(copy_pages, CopyPagesParams)                                                     \
  X(request_slots, RequestSlotsParams)                                               \
  X(batch_tables, BatchTablesParams)

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
