#include "cli/options/kernels_option.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "cli/options/decisions_option.h"
#include "cli/output/again.h"
#include "cuda_backend/backends.h"
#include "cuda_backend/plugin/plugin_kernels.h"
#include "cuda_backend/views/rank_share.h"
#include "sim/worker/kernel_process.h"

namespace lockstep {
namespace {

bool is_on_gpu(std::string_view backend) { return backend.starts_with("cuda_"); }

// Returns the processes of a Python class, started at the first call for it. They live as long as
// this program: a process imports torch, which costs more than most cases.
Result<std::shared_ptr<ForeignEngines>> processes_of(const std::string& backend) {
  // Runs in several threads share the processes; ForeignEngines lends each thread its own.
  static std::mutex mutex;
  static std::map<std::string, std::shared_ptr<ForeignEngines>> started;
  const std::lock_guard lock(mutex);
  std::shared_ptr<ForeignEngines>& processes = started[backend];
  if (processes != nullptr) return processes;
  const std::string named = backend.substr(backend.find(':') + 1);
  LS_ASSIGN_OR_RETURN(const std::string python, adapter_python("--kernels", named));
  LS_ASSIGN_OR_RETURN(processes,
                      ForeignEngines::open(kernel_process_options(fmt::format(
                          "{} -m lockstep_engines.user_kernels {}{}", python, shell_word(named),
                          is_on_gpu(backend) ? " --cuda" : ""))));
  return processes;
}

}  // namespace

void declare_kernels(CLI::App& command, std::function<void(const std::string& backend)> take) {
  declare_engine_python(command);
  command
      .add_option_function<std::string>(
          "--kernels",
          [&command, take = std::move(take)](const std::string& named) {
            // --backend chooses the pages: of the CPU executor, or of the GPU. Other backends have
            // none for a class.
            std::string_view prefix = "kernels:";
            for (const std::string& backend : command.get_option("--backend")->results()) {
              if (backend == "cuda")
                prefix = "cuda_kernels:";
              else if (backend != "auto" && backend != "simt")
                throw CLI::ValidationError(
                    fmt::format("--kernels with --backend {}", backend),
                    "the class runs on the pages of --backend simt or --backend cuda");
            }
            // A library states itself whether it needs a GPU.
            if (is_plugin(named) && named.ends_with(".so")) return take(named);
            if (std::string why; prefix.starts_with("cuda") && !gpu_available(&why))
              throw CLI::ValidationError("--kernels with --backend cuda", why);
            take(fmt::format("{}{}", prefix, named));
          },
          "your cache writes and attention: a Python class (module:Class, file.py:Class) or a "
          "library (FILE.so), on Lockstep's pages (docs/check_your_kernels.md)")
      ->type_name("CLASS");
}

Result<void> check_kernels(const std::string& backend) {
  if (is_plugin(backend)) {
    LS_ASSIGN_OR_RETURN(const auto plugin, load_plugin(backend));
    return check_gpu_for(*plugin);
  }
  LS_ASSIGN_OR_RETURN(const auto processes, processes_of(backend));
  LS_ASSIGN_OR_RETURN(const auto kernels, open_user_kernels(processes, {}, is_on_gpu(backend)));
  return check_gpu_for(*kernels);
}

BackendFactory kernels_factory(const std::string& backend) {
  return [backend](const BackendConfig& config) -> Result<std::unique_ptr<Backend>> {
    // Under tensor and context parallelism each rank's kernels receive that rank's layers.
    LS_ASSIGN_OR_RETURN(const auto share, cuda::share_of_rank(config));
    std::vector<KernelLayer> layers = kernel_layers(share.plan, config.numbers);
    if (is_plugin(backend)) {
      LS_ASSIGN_OR_RETURN(auto plugin, open_plugin(backend, std::move(layers)));
      return make_user_kernels_backend(config, std::move(plugin));
    }
    LS_ASSIGN_OR_RETURN(const auto processes, processes_of(backend));
    LS_ASSIGN_OR_RETURN(auto kernels,
                        open_user_kernels(processes, std::move(layers), is_on_gpu(backend)));
    return make_user_kernels_backend(config, std::move(kernels));
  };
}

}  // namespace lockstep
