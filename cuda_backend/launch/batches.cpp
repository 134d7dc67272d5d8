// Launchers of what a step's batch is made of: slots of its tokens, block tables of its requests.
#include "cuda_backend/kernels/batch_tables.cuh"
#include "cuda_backend/kernels/request_slots.cuh"
#include "cuda_backend/launch/engine_launchers.h"
#include "cuda_backend/launch/grid.h"

namespace lockstep::cuda {
namespace SIMT_VARIANT {

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
