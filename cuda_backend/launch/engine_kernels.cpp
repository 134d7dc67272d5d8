#include "cuda_backend/launch/engine_kernels.h"

#include "cuda_backend/launch/engine_launchers.h"

namespace lockstep::cuda {
namespace SIMT_VARIANT {

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
