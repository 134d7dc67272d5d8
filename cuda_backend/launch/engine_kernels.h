// Launchers of the kernels that a serving engine runs on real numbers: cache writes with
// quantisation, split attention, convolutions, recurrences, state and page moves, slots and block
// tables of a batch. A table of each build, beside the kernel_table whose kernels follow the
// protocol of sim/protocol/backend.h; the same promises hold (kernel_table.h). docs/kernels.md
// lists shapes, oracles and tolerances.
#pragma once

#include "cuda_backend/kernels/engine_params.h"
#include "cuda_backend/launch/kernel_table.h"

namespace lockstep::cuda {

struct EngineKernels {
  Launcher<WritePartsParams> write_parts;
  Launcher<SplitAttentionParams> split_attention;  // with the joining of its splits
  Launcher<ConvParams> causal_conv1d;
  Launcher<SelectiveStateParams> selective_state;
  Launcher<SelectiveStateParams> selective_chunks;  // the same function, for many tokens
  Launcher<GatedDeltaParams> gated_delta;
  Launcher<GatedDeltaParams> delta_chunks;  // the same function, for many tokens
  Launcher<MoveBytesParams> move_bytes;
  Launcher<CopyPagesParams> copy_pages;
  Launcher<RequestSlotsParams> request_slots;
  Launcher<BatchTablesParams> batch_tables;
};

SIMT_DECLARE_IN_VARIANTS(extern const EngineKernels engine_kernels;)

}  // namespace lockstep::cuda
