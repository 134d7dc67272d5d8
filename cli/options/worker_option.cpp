#include "cli/options/worker_option.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <utility>

#include "cli/options/decisions_option.h"
#include "sim/worker/worker_backend.h"

namespace lockstep {

void declare_worker(CLI::App& command, WorkerOptions& options) {
  command
      .add_option("--runner", options.runner,
                  "of --backend vllm: the first model runner of its worker, or the second")
      ->check(CLI::IsMember({"v1", "v2"}))
      ->capture_default_str();
  command
      .add_option("--states", options.states,
                  "of --backend vllm: its kind of layer for those that keep states")
      ->check(CLI::IsMember({"mamba2", "short_conv", "gdn"}));
  command
      .add_option("--plant", options.plant,
                  "of --backend vllm: a defect to plant in the worker; `python -m lockstep_engines "
                  "vllm --worker --plants` lists them")
      ->type_name("NAME");
}

Result<std::shared_ptr<ForeignEngines>> open_workers(const std::string& backend,
                                                     const WorkerOptions& options) {
  constexpr std::string_view kOwn = "worker:";
  std::string command;
  if (backend.starts_with(kOwn)) {
    command = backend.substr(kOwn.size());
    if (!options.plant.empty()) return fail("--plant is of --backend vllm");
    if (!options.states.empty()) return fail("--states is of --backend vllm");
  } else {
    LS_ASSIGN_OR_RETURN(command, adapter_command("--backend", backend));
    command += fmt::format(" --worker --runner {}", options.runner);
    if (!options.states.empty()) command += " --states " + options.states;
    if (!options.plant.empty()) command += " --plant " + shell_word(options.plant);
  }
  return ForeignEngines::open(worker_engine_options(std::move(command)));
}

BackendFactory worker_factory(std::shared_ptr<ForeignEngines> workers) {
  return [workers = std::move(workers)](const BackendConfig& config) {
    return make_worker_backend(workers, config);
  };
}

BackendFactory worker_factory(const std::string& backend, const WorkerOptions& options) {
  return [backend, options, engines = std::make_shared<std::shared_ptr<ForeignEngines>>()](
             const BackendConfig& config) -> Result<std::unique_ptr<Backend>> {
    if (*engines == nullptr) {
      LS_ASSIGN_OR_RETURN(*engines, open_workers(backend, options));
    }
    return make_worker_backend(*engines, config);
  };
}

}  // namespace lockstep
