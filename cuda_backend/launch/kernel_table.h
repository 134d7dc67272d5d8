// Every launcher of the backend in one table, so that host code is the same for every build of the
// kernels: simt_fast::kernel_table and simt_checked::kernel_table on the CPU,
// simt_cuda::kernel_table on a GPU.
//
// A launcher works out the grid, picks the instance (access width, planted defect) and launches;
// with nothing to do it launches nothing. It returns 0 or the platform's error, which error_text()
// puts in words. Launchers do not wait. They check shapes that a grid cannot express, and nothing
// else: what the parameters point to is the caller's word.
#pragma once

#include <cstdint>

#include "cuda_backend/defect.h"
#include "cuda_backend/kernels/engine_params.h"
#include "cuda_backend/kernels/params.h"
#include "cuda_backend/simt/simt.h"

namespace lockstep::cuda {

// Where and in what shape launches run. The same kernels take other shapes on a CPU, where a thread
// costs as much as twenty bytes moved.
struct LaunchPlace {
  void* stream = nullptr;
  std::uint32_t cta_threads = 256;
  std::uint32_t items_per_thread = 1;    // moves
  std::uint32_t items_per_reducer = 16;  // sums
  bool whole_warps = true;               // sums reduce over warps; CTAs are multiples of 32
  Defect defect = Defect::none;
};

template <class Params>
using Launcher = int (*)(const LaunchPlace& place, const Params& params);

struct KernelTable {
  Launcher<TableClearParams> clear_rows;
  Launcher<TableAppendParams> append_entries;
  Launcher<TableEditParams> edit_entries;
  Launcher<SlotMappingParams> slot_mapping;
  Launcher<FillRowsParams> fill_rows;
  Launcher<WriteRowsParams> write_rows;
  Launcher<GatherRowsParams> gather_rows;
  Launcher<ZeroBlocksParams> zero_blocks;
  Launcher<CopyBlocksParams> copy_blocks;
  Launcher<CopyPagesParams> copy_pages;  // between the cache and the host tier
  Launcher<PoisonBlocksParams> poison_blocks;
  Launcher<FingerprintParams> fingerprint_pages;
  Launcher<DigestParams> attention_digest;
  Launcher<AttentionParams> fill_queries;
  Launcher<AttentionParams> paged_attention;
  Launcher<StateUpdateParams> update_states;
  const char* (*error_text)(int error);
};

SIMT_DECLARE_IN_VARIANTS(extern const KernelTable kernel_table;)

}  // namespace lockstep::cuda
