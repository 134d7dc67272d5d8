// Launchers of block tables and slot mappings.
#include "cuda_backend/kernels/block_tables.cuh"
#include "cuda_backend/kernels/slot_mapping.cuh"
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

}  // namespace SIMT_VARIANT
}  // namespace lockstep::cuda
