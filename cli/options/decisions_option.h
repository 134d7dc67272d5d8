// --decisions: the engine that decides instead of the model, for every command that has it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "base/result.h"
#include "properties/audit/audit.h"
#include "properties/generate/generator.h"
#include "sim/foreign/foreign_engine.h"

namespace CLI {
class App;
}

namespace lockstep {

struct DecisionsOptions {
  std::string decisions;  // empty: the model
  std::int64_t timeout_s = 30;
  std::string option = "--decisions";  // that named it, for errors
  bool conforms = false;               // --conform
};

// --engine-python, once for each command that may start an adapter of this project.
void declare_engine_python(CLI::App& command);
void declare_decisions_timeout(CLI::App& command, std::int64_t& timeout_s);
// --decisions, --decisions-timeout and --engine-python.
void declare_decisions(CLI::App& command, DecisionsOptions& options);

// An interpreter that imports lockstep_engines, as the first words of a command. `option`, `named`:
// for error messages.
Result<std::string> adapter_python(std::string_view option, std::string_view named);
// The command that starts this project's adapter of "vllm[:DIR]" or "sglang[:DIR]"; `option` names
// where that was given.
Result<std::string> adapter_command(std::string_view option, const std::string& engine);
// --conform, for commands that have --decisions.
void declare_conform(CLI::App& command, DecisionsOptions& options);

// The engines that it names, the first of them started; null: the model decides.
Result<std::shared_ptr<ForeignEngines>> open_decisions(const DecisionsOptions& options);

// Names the engine that decided when a saved case failed, if a different one decides now; else
// empty. `engine`: the model's profile, which decides without `engines`.
std::string decider_text(const std::optional<RecordedEngine>& decided_by, const std::string& engine,
                         const ForeignEngines* engines);

// The profile that is nearest to it: of its release or the nearest one; for an engine that is not
// vLLM, of the newest.
std::string profile_of(const ForeignEngines& engines);
// How it is audited: by what vLLM plans for a request too, where it is vLLM.
AuditScope scope_of(const ForeignEngines& engines);
// What a generated case may not have: what the engine cannot be asked for, and what only the model
// can be given (faults, a host tier) or only its ranks.
FeatureSet features_to_avoid(const EngineHello& hello);
// Kinds of layers that it does not take.
FeatureSet layers_to_avoid(const EngineHello& hello);
// Restricts the generated caches to those that the engine, or the worker below it, takes.
void limit_caches(const EngineHello& hello, GeneratorOptions& generator);

}  // namespace lockstep
