#include "cuda_backend/backends.h"

#include <fmt/format.h>

#include <utility>

#include "cuda_backend/backend/cuda_backend.h"
#include "cuda_backend/defects/backend_mutants.h"
#include "cuda_backend/device/simt_device.h"
#include "cuda_backend/gpu/gpu_device.h"
#include "cuda_backend/streams/stream_device.h"

namespace lockstep {

#if !LOCKSTEP_HAVE_CUDA
std::string cuda::why_no_gpu() { return "no GPU: this build has no CUDA (no nvcc was found)"; }
Result<std::unique_ptr<cuda::Device>> cuda::make_gpu_device(std::int64_t) {
  return fail(why_no_gpu());
}
#endif

// Room for the arrays of a step, next to the pool, in memory that is one allocation.
constexpr std::int64_t kArrayBytes = std::int64_t{1} << 30;

static std::int64_t pool_size_bytes_of(const BackendConfig& config) {
  std::int64_t pool_size_bytes = 0;
  for (const KVCacheTensor& tensor : config.plan.tensors) pool_size_bytes += tensor.size_bytes;
  // A host block is no longer than a block's pages of all tensors.
  if (config.plan.num_blocks > 0)
    pool_size_bytes += pool_size_bytes / config.plan.num_blocks * config.num_host_blocks;
  return pool_size_bytes;
}

static Result<std::unique_ptr<cuda::Device>> device_of(const UserKernels& kernels,
                                                       const BackendConfig& config) {
  LS_RETURN_IF_ERROR(check_gpu_for(kernels));
  const std::int64_t pool = pool_size_bytes_of(config);
  if (kernels.on_gpu()) return cuda::make_gpu_device(kernels.in_process() ? 0 : pool + kArrayBytes);
  return cuda::make_simt_device(config.check, config.seed, pool, kernels.memory(),
                                config.num_threads);
}

Result<std::unique_ptr<Backend>> make_simt_backend(const BackendConfig& config) {
  LS_ASSIGN_OR_RETURN(auto seams, cuda::planted_seams(config));
  LS_ASSIGN_OR_RETURN(
      auto device, cuda::make_simt_device(config.check, config.seed, pool_size_bytes_of(config), {},
                                          config.num_threads));
  const bool delays = config.delay_streams || config.check == CheckMode::hunt;
  if (config.num_streams > 1 && delays)
    device = cuda::make_stream_queues(std::move(device), config.seed);
  return cuda::make_backend(std::move(device), config, std::move(seams));
}

bool gpu_available(std::string* why) {
  std::string missing = cuda::why_no_gpu();
  const bool available = missing.empty();
  if (why != nullptr) *why = std::move(missing);
  return available;
}

Result<void> check_gpu_for(const UserKernels& kernels) {
  std::string why;
  if (!kernels.on_gpu() || gpu_available(&why)) return {};
  return fail("{}: its kernels run on a GPU; {}", kernels.name(), why);
}

Result<std::unique_ptr<Backend>> make_gpu_backend(const BackendConfig& config) {
  if (std::string why; !gpu_available(&why)) return fail(std::move(why));
  if (config.check != CheckMode::fast)
    return fail("check: a GPU runs in mode fast; modes check and hunt are the SIMT executor's");
  if (config.delay_streams)
    return fail(
        "delay_streams: a GPU orders its streams itself; only the SIMT executor delays them");
  LS_ASSIGN_OR_RETURN(auto seams, cuda::planted_seams(config));
  LS_ASSIGN_OR_RETURN(auto device, cuda::make_gpu_device(0));
  return cuda::make_backend(std::move(device), config, std::move(seams));
}

Result<std::unique_ptr<Backend>> make_user_kernels_backend(const BackendConfig& config,
                                                           std::shared_ptr<UserKernels> kernels) {
  if (config.check != CheckMode::fast)
    return fail("--check: your own kernels run in mode fast; use --check fast");
  if (!config.mutant.empty())
    return fail(
        fmt::format("--mutant {}: this defect is planted in Lockstep's own kernels; leave "
                    "--kernels out",
                    config.mutant));
  if (config.num_streams > 1 || config.max_cudagraph_capture_size > 0)
    return fail("--streams, --graphs: your own kernels run one by one; leave these options out");
  LS_ASSIGN_OR_RETURN(auto device, device_of(*kernels, config));
  return cuda::make_backend(
      std::move(device), config,
      {.device = [kernels = std::move(kernels)](std::unique_ptr<cuda::Device> inner,
                                                cuda::Device&) mutable {
        return cuda::make_user_kernels_device(std::move(inner), std::move(kernels));
      }});
}

}  // namespace lockstep
