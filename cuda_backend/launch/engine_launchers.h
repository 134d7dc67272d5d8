// The launchers of one build, before they stand in its engine_kernels. See engine_kernels.h.
#pragma once

#include "cuda_backend/launch/engine_kernels.h"

namespace lockstep::cuda {
namespace SIMT_VARIANT {

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
