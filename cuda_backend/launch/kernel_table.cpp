#include "cuda_backend/launch/kernel_table.h"

#include "cuda_backend/launch/launchers.h"

namespace lockstep::cuda {
namespace SIMT_VARIANT {
namespace {
const char* error_text(int error) { return simt::error_string(static_cast<simt::error_t>(error)); }
}  // namespace

extern const KernelTable kernel_table = {
    .clear_rows = launch_clear_rows,
    .append_entries = launch_append_entries,
    .edit_entries = launch_edit_entries,
    .slot_mapping = launch_slot_mapping,
    .fill_rows = launch_fill_rows,
    .write_rows = launch_write_rows,
    .gather_rows = launch_gather_rows,
    .zero_blocks = launch_zero_blocks,
    .copy_blocks = launch_copy_blocks,
    .copy_pages = launch_copy_pages,
    .poison_blocks = launch_poison_blocks,
    .fingerprint_pages = launch_fingerprint_pages,
    .attention_digest = launch_attention_digest,
    .fill_queries = launch_fill_queries,
    .paged_attention = launch_paged_attention,
    .update_states = launch_update_states,
    .error_text = error_text,
};

extern const EngineKernels engine_kernels = {
    .write_parts = launch_write_parts,
    .split_attention = launch_split_attention,
    .causal_conv1d = launch_causal_conv1d,
    .selective_state = launch_selective_state,
    .selective_chunks = launch_selective_chunks,
    .gated_delta = launch_gated_delta,
    .delta_chunks = launch_delta_chunks,
    .move_bytes = launch_move_bytes,
    .copy_pages = launch_copy_pages,
    .request_slots = launch_request_slots,
    .batch_tables = launch_batch_tables,
};

}  // namespace SIMT_VARIANT
}  // namespace lockstep::cuda
