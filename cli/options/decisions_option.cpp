#include "cli/options/decisions_option.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <utility>

#include "base/data_root.h"
#include "cli/output/again.h"
#include "properties/generate/claimed_features.h"
#include "reference/profiles/engine_profile.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

std::string variable(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr || *value == '\0' ? otherwise : value;
}

// The interpreter of the environment that a wheel was installed into: its packages hold the
// adapters. Empty: not a wheel, or the user names an interpreter or folder.
fs::path interpreter_with_adapters() {
  for (const char* name : {"LOCKSTEP_PYTHON", "LOCKSTEP_PYTHONPATH"})
    if (!std::string_view(variable(name, "")).empty()) return {};
  const fs::path python = folder_of_program() / "python3";
  std::error_code error;
  if (fs::is_directory(data_root() / "python", error) || !fs::exists(python, error)) return {};
  return python;
}

// "vllm:DIR" is the adapter of this project, anything else a command of its own.
Result<std::string> command_of(const DecisionsOptions& options) {
  const std::string& decisions = options.decisions;
  const std::string engine = decisions.substr(0, decisions.find(':'));
  if (engine != "vllm" && engine != "sglang") return decisions;
  return adapter_command(options.option, decisions);
}

}  // namespace

Result<std::string> adapter_command(std::string_view option, const std::string& named) {
  const std::size_t colon = named.find(':');
  const std::string engine = named.substr(0, colon);
  std::string command;
  if (const fs::path python = interpreter_with_adapters(); !python.empty()) {
    command = fmt::format("{} -m lockstep_engines {}", shell_word(python.string()), engine);
  } else {
    const std::string path =
        variable("LOCKSTEP_PYTHONPATH", (data_root() / "python").string().c_str());
    if (!fs::is_directory(fs::path(path) / "lockstep_engines"))
      return fail(
          fmt::format("{} {}: the adapters are not in {}; set LOCKSTEP_PYTHONPATH to "
                      "the folder that holds lockstep_engines",
                      option, engine, path));
    command =
        fmt::format("PYTHONPATH={}${{PYTHONPATH:+:$PYTHONPATH}} {} -m lockstep_engines {}",
                    shell_word(path), shell_word(variable("LOCKSTEP_PYTHON", "python3")), engine);
  }
  if (colon == std::string::npos) return command;
  const std::string folder = named.substr(colon + 1);
  if (!fs::is_directory(folder))
    return fail(fmt::format("{} {}: there is no folder {}", option, named, folder));
  return command + " " + shell_word(fs::absolute(folder).string());
}

void declare_decisions(CLI::App& command, DecisionsOptions& options) {
  command
      .add_option(
          "--decisions", options.decisions,
          "the scheduler in place of the model: vllm[:DIR], sglang[:DIR], or a command that "
          "speaks docs/protocols.md")
      ->type_name("ENGINE");
  command
      .add_option("--decisions-timeout", options.timeout_s,
                  "seconds that a reply of it may take; beyond them it hangs")
      ->check(CLI::Range(1, 86'400).description(""))
      ->type_name("S")
      ->capture_default_str();
}

void declare_conform(CLI::App& command, DecisionsOptions& options) {
  command
      .add_flag("--conform", options.conforms,
                "compare every field of every step with the model's decision (docs/fuzzing.md)")
      ->needs("--decisions");
}

Result<std::shared_ptr<ForeignEngines>> open_decisions(const DecisionsOptions& options) {
  if (options.decisions.empty()) return std::shared_ptr<ForeignEngines>();
  LS_ASSIGN_OR_RETURN(auto command, command_of(options));
  const auto limit = std::chrono::seconds(options.timeout_s);
  return ForeignEngines::open({.command = std::move(command),
                               .time_limit = limit,
                               .start_limit = std::max(limit, std::chrono::seconds(120))});
}

std::string decider_text(const std::optional<RecordedEngine>& decided_by, const std::string& engine,
                         const ForeignEngines* engines) {
  if (!decided_by) return {};
  if (engines == nullptr)
    return fmt::format(
        "When this case failed {} decided. Here the model of {} does, which may decide otherwise; "
        "--decisions ENGINE asks an engine.\n",
        decided_by->text(), engine);
  const RecordedEngine& now = engines->hello().engine;
  if (now == *decided_by) return {};
  return fmt::format("When this case failed {} decided; here {} does.\n", decided_by->text(),
                     now.text());
}

std::string profile_of(const ForeignEngines& engines) {
  const RecordedEngine& engine = engines.hello().engine;
  return engine.name == "vllm" ? engine.profile() : EngineConfig().engine;
}

AuditScope scope_of(const ForeignEngines& engines) {
  return engines.hello().engine.name == "vllm" ? AuditScope::other_engine
                                               : AuditScope::running_engine;
}

namespace {

FeatureSet not_claimed(const EngineHello& hello, bool kinds_alone) {
  FeatureSet avoid;
  for (const ClaimedFeature& feature : kClaimedFeatures) {
    const auto covers = [&](const std::string& word) { return feature.covers(word); };
    if ((feature.is_kind || !kinds_alone) && std::ranges::none_of(hello.features, covers))
      avoid.add(feature.of);
  }
  return avoid;
}

}  // namespace

FeatureSet layers_to_avoid(const EngineHello& hello) { return not_claimed(hello, true); }

FeatureSet features_to_avoid(const EngineHello& hello) {
  FeatureSet avoid{Feature::faults,
                   Feature::host_tier,
                   Feature::tensor_parallel,
                   Feature::replicated_heads,
                   Feature::data_parallel,
                   Feature::pipeline_parallel,
                   Feature::several_connectors,
                   Feature::engine_hashes,
                   Feature::bounded_replay,
                   Feature::rings,
                   Feature::compressed_rows};
  avoid.add(kBesideTokens);
  avoid.add(not_claimed(hello, false));
  return avoid;
}

}  // namespace lockstep
