// Launchers of block tables and slot mappings.
#include "cuda_backend/kernels/block_tables.cuh"
#include "cuda_backend/kernels/request_slots.cuh"
#include "cuda_backend/launch/grid.h"
#include "cuda_backend/launch/launchers.h"

namespace lockstep::cuda {
namespace SIMT_VARIANT {

int launch_clear_rows(const LaunchPlace& place, const TableClearParams& params) {
  const std::int64_t items = std::int64_t{params.num_rows} * params.num_groups;
  if (items == 0) return nothing_to_do();
  return status_of(simt::launch(flat_grid(place, "clear_rows", items), clear_rows_kernel, params));
}

int launch_append_entries(const LaunchPlace& place, const TableAppendParams& params) {
  if (params.num_appends == 0) return nothing_to_do();
  auto config = config_of(place, "append_entries");
  config.grid.x = static_cast<std::uint32_t>(params.num_appends);
  config.block.x = std::min<std::uint32_t>(place.cta_threads, 32);
  auto* kernel = place.defect == KernelDefect::table_unsplit ? append_entries_kernel<false>
                                                             : append_entries_kernel<true>;
  return status_of(simt::launch(config, kernel, params));
}

int launch_edit_entries(const LaunchPlace& place, const TableEditParams& params) {
  if (params.num_edits == 0) return nothing_to_do();
  auto* kernel = place.defect == KernelDefect::table_unsplit ? edit_entries_kernel<false>
                                                             : edit_entries_kernel<true>;
  const auto config = flat_grid(place, "edit_entries", params.num_edits);
  return status_of(simt::launch(config, kernel, params));
}

int launch_slot_mapping(const LaunchPlace& place, const SlotMappingParams& params) {
  if (params.num_padded_tokens == 0) return nothing_to_do();
  auto config = flat_grid(place, "slot_mapping", params.num_padded_tokens);
  config.grid.y = static_cast<std::uint32_t>(params.num_groups);
  return status_of(simt::launch(config, slot_mapping_kernel, params));
}

// Launchers of what a step's batch is made of: slots of its tokens, block tables of its requests.
int launch_request_slots(const LaunchPlace& place, const RequestSlotsParams& params) {
  if (params.num_padded_tokens == 0 || params.num_groups == 0) return nothing_to_do();
  if (!fits_grid(params.num_requests + std::int64_t{1}, params.num_groups)) return too_large();
  auto config = job_grid(place, "request_slots", params.num_requests + std::int64_t{1},
                         params.num_padded_tokens);
  config.grid.y = static_cast<std::uint32_t>(params.num_groups);
  return status_of(simt::launch(config, request_slots_kernel, params));
}

int launch_batch_tables(const LaunchPlace& place, const BatchTablesParams& params) {
  if (params.num_requests == 0 || params.num_groups == 0) return nothing_to_do();
  if (!fits_grid(params.num_requests, params.num_groups)) return too_large();
  auto config = job_grid(place, "batch_tables", params.num_requests, params.max_width);
  config.grid.y = static_cast<std::uint32_t>(params.num_groups);
  return status_of(simt::launch(config, batch_tables_kernel, params));
}

}  // namespace SIMT_VARIANT
}  // namespace lockstep::cuda
