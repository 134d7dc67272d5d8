#include "cli/options/decisions_option.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <utility>

#include "base/data_root.h"
#include "cli/output/again.h"
#include "properties/generate/claimed_features.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

// An empty variable counts as unset, as in most shell scripts.
std::string variable(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr || *value == '\0' ? otherwise : value;
}

// An interpreter for engines, and which setting chose it.
struct Interpreter {
  std::string program;
  std::string_view named_by;  // for the message if the program does not exist
};

// The value of --engine-python. One variable for all commands, since a process runs one command.
std::string& engine_python() {
  static std::string program;
  return program;
}

// Returns the interpreter of the environment that this program's wheel is installed in; empty: the
// program is not from a wheel. pip puts the interpreter into the first line of the wheel's scripts.
std::string interpreter_of_wheel() {
  std::ifstream script(folder_of_program() / "lockstep-set-up-engine");
  std::string line;
  if (!std::getline(script, line) || !line.starts_with("#!")) return {};
  // For an interpreter with a long path pip writes "#!/bin/sh" and starts the interpreter in the
  // next line. It is in the same folder.
  const std::string program = line.substr(2, line.find(' ') - 2);
  if (!program.ends_with("/sh")) return program;
  return (folder_of_program() / "python3").string();
}

// Returns the first of: --engine-python, the active virtual environment, the wheel's environment,
// LOCKSTEP_PYTHON, python3. The virtual environment precedes the wheel's, because a user activates
// it to choose an engine.
Interpreter interpreter_for_engines() {
  if (!engine_python().empty()) return {engine_python(), "--engine-python"};
  std::error_code error;
  if (const fs::path active = variable("VIRTUAL_ENV", ""); !active.empty())
    if (const fs::path python = active / "bin" / "python"; fs::exists(python, error))
      return {python.string(), "VIRTUAL_ENV"};
  if (std::string python = interpreter_of_wheel(); !python.empty())
    return {std::move(python), "the wheel"};
  return {variable("LOCKSTEP_PYTHON", "python3"), "LOCKSTEP_PYTHON"};
}

// Returns the command to run: "vllm[:DIR]" and "sglang[:DIR]" start the adapter of this project,
// anything else is a command itself.
Result<std::string> command_of(const DecisionsOptions& options) {
  const std::string& decisions = options.decisions;
  const std::string engine = decisions.substr(0, decisions.find(':'));
  if (engine != "vllm" && engine != "sglang") return decisions;
  return adapter_command(options.option, decisions);
}

}  // namespace

Result<std::string> adapter_python(std::string_view option, std::string_view named) {
  const std::string path =
      variable("LOCKSTEP_PYTHONPATH", (data_root() / "python").string().c_str());
  if (!fs::is_directory(fs::path(path) / "lockstep_engines"))
    return fail(
        "{} {}: the adapters are not in {}; set LOCKSTEP_PYTHONPATH to the folder of "
        "lockstep_engines",
        option, named, path);
  const Interpreter python = interpreter_for_engines();
  std::error_code error;
  // A name without a slash is found through PATH, so only a path can be checked here.
  if (python.program.find('/') != std::string::npos && !fs::exists(python.program, error))
    return fail(
        "{} {}: {} names {}, which does not exist; give the interpreter of an environment with "
        "--engine-python",
        option, named, python.named_by, python.program);
  // Keeps the user's PYTHONPATH after the adapters' folder.
  return fmt::format("PYTHONPATH={}\"${{PYTHONPATH:+:$PYTHONPATH}}\" {}", shell_word(path),
                     shell_word(python.program));
}

Result<std::string> adapter_command(std::string_view option, const std::string& named) {
  const std::size_t colon = named.find(':');
  const std::string engine = named.substr(0, colon);
  LS_ASSIGN_OR_RETURN(const std::string python, adapter_python(option, named));
  std::string command = fmt::format("{} -m lockstep_engines {}", python, engine);
  if (colon == std::string::npos) return command;
  const std::string folder = named.substr(colon + 1);
  if (!fs::is_directory(folder)) return fail("{} {}: no folder {}", option, named, folder);
  return command + " " + shell_word(fs::absolute(folder).string());
}

void declare_engine_python(CLI::App& command) {
  if (command.get_option_no_throw("--engine-python") != nullptr) return;
  command
      .add_option("--engine-python", engine_python(),
                  "Python for vllm[:DIR], sglang[:DIR] and --kernels (the active virtual "
                  "environment's or the wheel's, else LOCKSTEP_PYTHON)")
      ->check(CLI::Validator(
          [](std::string& program) {
            std::error_code error;  // a name without a slash is found through PATH
            return program.find('/') == std::string::npos || fs::exists(program, error)
                       ? std::string()
                       : fmt::format("{} does not exist; give the interpreter of an environment",
                                     program);
          },
          ""))
      ->type_name("FILE");
}

void declare_decisions(CLI::App& command, DecisionsOptions& options) {
  declare_engine_python(command);
  command
      .add_option("--decisions", options.decisions,
                  "scheduler to use instead of the model: vllm[:DIR], sglang[:DIR], or a command "
                  "that speaks docs/protocols.md")
      ->type_name("ENGINE");
  declare_decisions_timeout(command, options.timeout_s)->needs("--decisions");
}

CLI::Option* declare_decisions_timeout(CLI::App& command, std::int64_t& timeout_s) {
  return command
      .add_option("--decisions-timeout", timeout_s, "reply timeout of an engine in seconds")
      ->check(CLI::Range(1, 86'400).description(""))
      ->type_name("S")
      ->capture_default_str();
}

void declare_audit_policy(CLI::App& command, const std::string& names, std::string& policy) {
  command
      .add_option(names, policy,
                  "also audit by the rules about policy: hits, victim, standstill, limits, excess "
                  "blocks")
      ->check(CLI::IsMember({"on", "off"}))
      ->capture_default_str();
}

void declare_checks(CLI::App& command, DecisionsOptions& options) {
  command
      .add_flag("--conform", options.conforms,
                "compare every field of every step with the model's decision (docs/fuzzing.md)")
      ->needs("--decisions");
  declare_audit_policy(command, "--audit-policy", options.audit_policy);
}

Result<std::shared_ptr<ForeignEngines>> open_decisions(const DecisionsOptions& options) {
  if (options.decisions.empty()) return std::shared_ptr<ForeignEngines>();
  LS_ASSIGN_OR_RETURN(auto command, command_of(options));
  // An engine imports for up to minutes before its first reply.
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
        "{} decided when this case failed. Here the model of {} decides, perhaps differently; "
        "--decisions ENGINE uses an engine.\n",
        decided_by->text(), engine);
  const RecordedEngine& now = engines->hello().engine;
  if (now == *decided_by) return {};
  return fmt::format("{} decided when this case failed; here {} does.\n", decided_by->text(),
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

constexpr std::string_view kLacks = "lacks:";
constexpr std::string_view kStateMode = "mamba_cache_mode:";

// Returns the features that `hello` does not claim, and those that it names as "lacks:FEATURE".
// `kinds_alone`: of the claims only kinds of layers, which are all that a worker has.
FeatureSet not_claimed(const EngineHello& hello, bool kinds_alone) {
  FeatureSet avoid;
  for (std::size_t i = 0; i < kNumFeatures; ++i)
    if (hello.can(fmt::format("{}{}", kLacks, kFeatures[i].name)))
      avoid.add(static_cast<Feature>(i));
  for (const ClaimedFeature& feature : kClaimedFeatures) {
    const auto covers = [&](const std::string& word) { return feature.covers(word); };
    if ((feature.is_kind || !kinds_alone) && std::ranges::none_of(hello.features, covers))
      avoid.add(feature.of);
  }
  return avoid;
}

}  // namespace

FeatureSet layers_to_avoid(const EngineHello& hello) { return not_claimed(hello, true); }

void limit_caches(const EngineHello& hello, GeneratorOptions& generator) {
  generator.one_pool_per_kind |= hello.can("one_pool_per_kind");
  // An engine that claims no mode accepts all of them.
  if (std::ranges::none_of(hello.features,
                           [](const std::string& word) { return word.starts_with(kStateMode); }))
    return;
  std::vector<MambaCacheMode>& modes = generator.state_modes;
  if (modes.empty()) modes = {MambaCacheMode::none, MambaCacheMode::align, MambaCacheMode::all};
  std::erase_if(modes, [&](MambaCacheMode mode) {
    return !hello.can(fmt::format("{}{}", kStateMode, name_of(mode)));
  });
}

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
