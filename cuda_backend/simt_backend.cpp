#include "cuda_backend/simt_backend.h"

#include "cuda_backend/backend/cuda_backend.h"
#include "cuda_backend/defects/backend_mutants.h"
#include "cuda_backend/device/simt_device.h"
#include "cuda_backend/streams/stream_device.h"

namespace lockstep {

Result<std::unique_ptr<Backend>> make_simt_backend(const BackendConfig& config) {
  LS_ASSIGN_OR_RETURN(auto seams, cuda::planted_seams(config));
  std::int64_t pool_size_bytes = 0;
  for (const KVCacheTensor& tensor : config.plan.tensors) pool_size_bytes += tensor.size_bytes;
  // A host block is no longer than a block's pages of all tensors.
  if (config.plan.num_blocks > 0)
    pool_size_bytes += pool_size_bytes / config.plan.num_blocks * config.num_host_blocks;
  LS_ASSIGN_OR_RETURN(auto device,
                      cuda::make_simt_device(config.check, config.seed, pool_size_bytes));
  const bool delays = config.delay_streams || config.check == CheckMode::hunt;
  if (config.num_streams > 1 && delays)
    device = cuda::make_stream_queues(std::move(device), config.seed);
  return cuda::make_backend(std::move(device), config, std::move(seams));
}

}  // namespace lockstep
