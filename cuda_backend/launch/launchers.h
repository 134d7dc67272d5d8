// The launchers of one build, before they stand in the tables of kernel_table.h.
#pragma once

#include "cuda_backend/launch/kernel_table.h"

namespace lockstep::cuda {
namespace SIMT_VARIANT {

int launch_clear_rows(const LaunchPlace& place, const TableClearParams& params);
int launch_append_entries(const LaunchPlace& place, const TableAppendParams& params);
int launch_edit_entries(const LaunchPlace& place, const TableEditParams& params);
int launch_slot_mapping(const LaunchPlace& place, const SlotMappingParams& params);
int launch_fill_rows(const LaunchPlace& place, const FillRowsParams& params);
int launch_write_rows(const LaunchPlace& place, const WriteRowsParams& params);
int launch_gather_rows(const LaunchPlace& place, const GatherRowsParams& params);
int launch_zero_blocks(const LaunchPlace& place, const ZeroBlocksParams& params);
int launch_copy_blocks(const LaunchPlace& place, const CopyBlocksParams& params);
int launch_poison_blocks(const LaunchPlace& place, const PoisonBlocksParams& params);
int launch_fingerprint_pages(const LaunchPlace& place, const FingerprintParams& params);
int launch_attention_digest(const LaunchPlace& place, const DigestParams& params);
int launch_fill_queries(const LaunchPlace& place, const AttentionParams& params);
int launch_paged_attention(const LaunchPlace& place, const AttentionParams& params);
int launch_update_states(const LaunchPlace& place, const StateUpdateParams& params);

// Before they stand in engine_kernels.
int launch_write_parts(const LaunchPlace& place, const WritePartsParams& params);
int launch_split_attention(const LaunchPlace& place, const SplitAttentionParams& params);
int launch_causal_conv1d(const LaunchPlace& place, const ConvParams& params);
int launch_selective_state(const LaunchPlace& place, const SelectiveStateParams& params);
int launch_selective_chunks(const LaunchPlace& place, const SelectiveStateParams& params);
int launch_gated_delta(const LaunchPlace& place, const GatedDeltaParams& params);
int launch_delta_chunks(const LaunchPlace& place, const GatedDeltaParams& params);
int launch_move_bytes(const LaunchPlace& place, const MoveBytesParams& params);
int launch_copy_pages(const LaunchPlace& place, const CopyPagesParams& params);
int launch_request_slots(const LaunchPlace& place, const RequestSlotsParams& params);
int launch_batch_tables(const LaunchPlace& place, const BatchTablesParams& params);

}  // namespace SIMT_VARIANT
}  // namespace lockstep::cuda
