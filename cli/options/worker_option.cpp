#include "cli/options/worker_option.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <utility>

#include "cli/options/decisions_option.h"
#include "cli/output/again.h"

namespace lockstep {

void declare_worker(CLI::App& command, WorkerOptions& options) {
  declare_engine_python(command);
  command
      .add_option(
          "--runner", options.runner,
          "--backend vllm: model runner of its worker, V1 or V2 (a saved case's own, else v1)")
      ->check(CLI::IsMember({"v1", "v2"}));
  command
      .add_option("--states", options.states,
                  "--backend vllm: kind of its layers with recurrent states")
      ->check(CLI::IsMember({"mamba2", "short_conv", "gdn"}));
  command
      .add_option("--plant", options.plant,
                  "--backend vllm: defect to plant in the worker; `python -m lockstep_engines vllm "
                  "--worker --plants` lists them")
      ->type_name("NAME");
}

WorkerOptions with_case(WorkerOptions options, const std::optional<WorkedBy>& worked_by) {
  if (!worked_by) return options;
  // The command line wins: it may repeat a case on another runner on purpose.
  if (options.runner.empty()) options.runner = worked_by->runner;
  if (options.states.empty()) options.states = worked_by->states;
  if (options.plant.empty()) options.plant = worked_by->plant;
  return options;
}

Result<void> check_worker_options(const std::string& backend, const WorkerOptions& given) {
  if (is_engine_worker(backend)) return {};  // open_workers() checks what worker:COMMAND takes
  for (const auto& [name, value] : {std::pair("--runner", &given.runner),
                                    {"--states", &given.states},
                                    {"--plant", &given.plant}})
    if (!value->empty())
      return fail("{} applies only to an engine's own worker; use --backend vllm instead of {}",
                  name, backend);
  return {};
}

Result<std::shared_ptr<ForeignEngines>> open_workers(const std::string& backend,
                                                     const WorkerOptions& options) {
  // A worker command of the user has none of vLLM's options.
  constexpr std::string_view kOwn = "worker:";
  std::string command;
  if (backend.starts_with(kOwn)) {
    command = backend.substr(kOwn.size());
    if (!options.plant.empty()) return fail("--plant applies only to --backend vllm");
    if (!options.states.empty()) return fail("--states applies only to --backend vllm");
  } else {
    LS_ASSIGN_OR_RETURN(command, adapter_command("--backend", backend));
    command += fmt::format(" --worker --runner {}",
                           shell_word(options.runner.empty() ? "v1" : options.runner));
    if (!options.states.empty()) command += " --states " + options.states;
    if (!options.plant.empty()) command += " --plant " + shell_word(options.plant);
  }
  return ForeignEngines::open(worker_engine_options(std::move(command)));
}

BackendFactory worker_factory(std::shared_ptr<ForeignEngines> workers, FactsSink facts) {
  return [workers = std::move(workers), facts = std::move(facts)](const BackendConfig& config) {
    return make_worker_backend(workers, config, facts);
  };
}

BackendFactory worker_factory(const std::string& backend, const WorkerOptions& options) {
  // The processes are shared by the copies of this factory, and start when the first backend is
  // made.
  return [backend, options, engines = std::make_shared<std::shared_ptr<ForeignEngines>>()](
             const BackendConfig& config) -> Result<std::unique_ptr<Backend>> {
    if (*engines == nullptr) {
      LS_ASSIGN_OR_RETURN(*engines, open_workers(backend, options));
    }
    return make_worker_backend(*engines, config);
  };
}

namespace {

// "runner:v2" in the worker's features; empty: the worker has only one.
std::string runner_of(const EngineHello& hello) {
  constexpr std::string_view kRunner = "runner:";
  for (const std::string& feature : hello.features)
    if (feature.starts_with(kRunner)) return feature.substr(kRunner.size());
  return {};
}

}  // namespace

WorkedBy worker_of(const ForeignEngines& workers, const WorkerOptions& options) {
  return {.engine = workers.hello().engine,
          .runner = runner_of(workers.hello()),
          .states = options.states,
          .plant = options.plant};
}

std::string worker_text(const std::optional<WorkedBy>& worked_by, const std::string& backend,
                        const std::optional<WorkedBy>& now) {
  if (!worked_by || worked_by == now) return {};
  return fmt::format("The worker of {} held the cache when this case failed; here {} does.\n",
                     worked_by->text(), now ? "that of " + now->text() : "--backend " + backend);
}

namespace {

// True if a word of the worker starts with `word`: "dtype:fp8" stands for both fp8 formats.
bool takes(const EngineHello& hello, std::string_view word) {
  return std::ranges::any_of(hello.features,
                             [&](const std::string& feature) { return feature.starts_with(word); });
}

}  // namespace

void fit_generator(const EngineHello& hello, GeneratorOptions& generator) {
  // The protocol has one device, and neither host memory nor transfers. Real numbers need kernels
  // of this program.
  generator.never.add({Feature::context_parallel, Feature::tensor_parallel,
                       Feature::pipeline_parallel, Feature::data_parallel, Feature::connector_peers,
                       Feature::host_tier, Feature::failing_loads, Feature::load_failure_fails,
                       Feature::several_connectors, Feature::async_connectors,
                       Feature::whole_caches, Feature::captured_graphs, Feature::real_numbers});
  generator.never.add(layers_to_avoid(hello));
  limit_caches(hello, generator);
  // Words that only workers have; decisions_option.h covers those of schedulers.
  constexpr std::pair<std::string_view, FeatureSet> kNeeds[] = {
      {"uniform_type", {Feature::uniform_type}},
      {"packed_pages", {Feature::packed_pages}},
      {"padded_pages", {Feature::padded_pages}},
      {"kernel_blocks", {Feature::kernel_blocks}},
      {"async_scheduling", {Feature::async_scheduling}},
      {"drafts", {Feature::drafts}},
      {"dtype:fp8", {Feature::scaled_rows}},
  };
  for (const auto& [feature, of] : kNeeds)
    if (!takes(hello, feature)) generator.never.add(of);
  GeneratorOptions::Worker& worker = generator.worker.emplace();
  worker.drafts_in_flight = takes(hello, "drafts_in_flight");
  // Without this word a worker takes caches of one dtype only.
  worker.one_dtype = !takes(hello, "several_dtypes");
  for (const DType dtype :
       {DType::bf16, DType::fp16, DType::fp32, DType::fp8_e4m3, DType::fp8_e5m2})
    if (takes(hello, fmt::format("dtype:{}", name_of(dtype)))) worker.dtypes.push_back(dtype);
  // Elements of an MLA latent that generated cases may have; a worker claims each one as
  // "latent:SIZE".
  for (const std::int64_t size : {320, 512, 576})
    if (takes(hello, fmt::format("latent:{}", size))) worker.latent_sizes.push_back(size);
  generator.check = "fast";
}

}  // namespace lockstep
