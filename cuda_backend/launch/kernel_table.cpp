#include "cuda_backend/launch/kernel_table.h"

#include "cuda_backend/launch/engine_launchers.h"
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

}  // namespace SIMT_VARIANT
}  // namespace lockstep::cuda
