#include "cli/replay_backend.h"

#include <string>

#include "cuda_backend/gpu_backend.h"
#include "cuda_backend/plugin/plugin_backend.h"
#include "cuda_backend/simt_backend.h"

namespace lockstep {

Result<std::unique_ptr<Backend>> make_backend(std::string_view name, const BackendConfig& config) {
  if (name == "none") {
    if (config.check != CheckMode::fast || !config.mutant.empty() || config.num_streams > 1 ||
        config.max_cudagraph_capture_size > 0 || config.numbers != Numbers::words) {
      return fail(
          "--check, --mutant, --streams, --graphs and --numbers need a backend, and --backend none "
          "is the model alone");
    }
    return std::unique_ptr<Backend>();
  }
  if (name != "auto" && name != "cuda" && name != "simt")
    return make_plugin_backend(std::string(name), config);
  if (config.delay_streams && config.num_streams < 2)
    return fail("--delay-streams moves operations of different streams; give --streams 2 or more");
  const bool on_cpu = config.check != CheckMode::fast || config.delay_streams;
  if (name == "cuda" || (name == "auto" && !on_cpu && gpu_available())) {
    return make_gpu_backend(config);
  }
  return make_simt_backend(config);
}

}  // namespace lockstep
