#include "tests/cuda_runtime/queued_kernels.h"

#include "base/check.h"
#include "tests/cuda_runtime/simulated_cuda.h"

namespace lockstep::cuda::simt_simulated {
namespace {

const KernelTable& table_with(auto KernelTable::*) { return simt_fast::kernel_table; }
const EngineKernels& table_with(auto EngineKernels::*) { return simt_fast::engine_kernels; }

template <auto kMember, class Params>
int queue(const LaunchPlace& place, const Params& params) {
  return SimulatedCuda::current().launch(
      static_cast<cudaStream_t>(place.stream), [place, params](simt::Executor* executor) {
        LaunchPlace on_executor = place;
        on_executor.stream = executor;
        const int error = (table_with(kMember).*kMember)(on_executor, params);
        LS_CHECK(error == 0, "{}", simt_fast::kernel_table.error_text(error));
      });
}

const char* error_text(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

}  // namespace

extern const KernelTable kernel_table = {
    .clear_rows = queue<&KernelTable::clear_rows>,
    .append_entries = queue<&KernelTable::append_entries>,
    .edit_entries = queue<&KernelTable::edit_entries>,
    .slot_mapping = queue<&KernelTable::slot_mapping>,
    .draft_slots = queue<&KernelTable::draft_slots>,
    .fill_rows = queue<&KernelTable::fill_rows>,
    .gather_rows = queue<&KernelTable::gather_rows>,
    .zero_blocks = queue<&KernelTable::zero_blocks>,
    .copy_blocks = queue<&KernelTable::copy_blocks>,
    .poison_blocks = queue<&KernelTable::poison_blocks>,
    .fingerprint_pages = queue<&KernelTable::fingerprint_pages>,
    .attention_digest = queue<&KernelTable::attention_digest>,
    .update_states = queue<&KernelTable::update_states>,
    .mirror_rows = queue<&KernelTable::mirror_rows>,
    .clear_regions = queue<&KernelTable::clear_regions>,
    .hot_reads = queue<&KernelTable::hot_reads>,
    .swap_rows = queue<&KernelTable::swap_rows>,
    .error_text = error_text,
};

extern const EngineKernels engine_kernels = {
    .write_parts = queue<&EngineKernels::write_parts>,
    .split_attention = queue<&EngineKernels::split_attention>,
    .causal_conv1d = queue<&EngineKernels::causal_conv1d>,
    .selective_state = queue<&EngineKernels::selective_state>,
    .selective_chunks = queue<&EngineKernels::selective_chunks>,
    .gated_delta = queue<&EngineKernels::gated_delta>,
    .delta_chunks = queue<&EngineKernels::delta_chunks>,
    .move_bytes = queue<&EngineKernels::move_bytes>,
};

}  // namespace lockstep::cuda::simt_simulated
