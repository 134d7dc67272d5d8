#include "cuda_backend/gpu_backend.h"

#include <utility>

#if LOCKSTEP_HAVE_CUDA
#include "cuda_backend/backend/cuda_backend.h"
#include "cuda_backend/defects/backend_mutants.h"
#include "cuda_backend/gpu/gpu_device.h"
#endif

namespace lockstep {

#if LOCKSTEP_HAVE_CUDA

bool gpu_available(std::string* why) {
  std::string missing = cuda::why_no_gpu();
  const bool available = missing.empty();
  if (why != nullptr) *why = std::move(missing);
  return available;
}

Result<std::unique_ptr<Backend>> make_gpu_backend(const BackendConfig& config) {
  if (config.check != CheckMode::fast)
    return fail("check: a GPU runs in mode fast; modes check and hunt are the SIMT executor's");
  if (config.delay_streams)
    return fail(
        "delay_streams: a GPU orders its streams itself; only the SIMT executor delays them");
  LS_ASSIGN_OR_RETURN(auto seams, cuda::planted_seams(config));
  LS_ASSIGN_OR_RETURN(auto device, cuda::make_gpu_device());
  return cuda::make_backend(std::move(device), config, std::move(seams));
}

#else

bool gpu_available(std::string* why) {
  if (why != nullptr) *why = "no GPU: this build has no CUDA (no nvcc was found)";
  return false;
}

Result<std::unique_ptr<Backend>> make_gpu_backend(const BackendConfig&) {
  std::string why;
  gpu_available(&why);
  return fail(std::move(why));
}

#endif

}  // namespace lockstep
