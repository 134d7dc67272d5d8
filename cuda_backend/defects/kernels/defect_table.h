// Launchers that compute something wrong, for defects that no program, upload or parameter can
// express. Each takes the place of the launcher that its comment names and has its signature.
//
// 1. Kernels of the product contain no defect. A launcher here starts the product's launch first
//    and then spoils its result, or replaces the launch.
// 2. Launches have the name of the launch that they stand for, so reports read the same.
#pragma once

#include "cuda_backend/launch/kernel_table.h"

namespace lockstep::cuda {

struct DefectKernels {
  // write_parts. A second CTA writes the last token's row to the first token's slot.
  Launcher<WritePartsParams> write_twice;
  // write_parts. The block's offset is computed in 32 bits.
  Launcher<WritePartsParams> write_in_32_bits;
  // write_parts. The scales of the written rows are lost.
  Launcher<WritePartsParams> lose_scales;
  // update_states. Two CTAs write one byte of a state.
  Launcher<StateUpdateParams> update_twice;
  // split_attention. Partial softmaxes are added without their rescale.
  Launcher<SplitAttentionParams> combine_unscaled;
  // selective_chunks, delta_chunks. The state before a piece enters it without its decay.
  Launcher<SelectiveStateParams> selective_undecayed;
  Launcher<GatedDeltaParams> delta_undecayed;
  // hot_reads. A row takes the slot of a row that the same read uses.
  Launcher<HotReadParams> evict_used;
  // swap_rows. A slot receives the host row of its own number.
  Launcher<SwapRowsParams> swap_by_slot;
};

SIMT_DECLARE_IN_VARIANTS(extern const DefectKernels defect_kernels;)

// The defects compiled for the same platform as `kernels`, a table of the product.
const DefectKernels& defect_kernels_of(const KernelTable& kernels);

}  // namespace lockstep::cuda
