// Declares --decisions, which names an engine that decides instead of the model; starts it; and
// derives from its `hello` what a generated case may contain.
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

// Returns the rules that a value of --audit-policy leaves.
inline AuditedRules rules_of_policy(std::string_view policy) {
  return policy == "on" ? AuditedRules::all : AuditedRules::memory;
}

struct DecisionsOptions {
  std::string decisions;        // "vllm[:DIR]", "sglang[:DIR]" or a command; empty: the model
  std::int64_t timeout_s = 30;  // per reply; the first one may take longer
  std::string option = "--decisions";  // option that named the engine, for error messages
  bool conforms = false;               // --conform
  std::string audit_policy = "on";     // --audit-policy
  AuditedRules rules() const { return rules_of_policy(audit_policy); }
};

// Declares --engine-python, for commands that may start an adapter of this project. Further calls
// for the same command have no effect.
void declare_engine_python(CLI::App& command);
// Declares --decisions-timeout.
CLI::Option* declare_decisions_timeout(CLI::App& command, std::int64_t& timeout_s);
// Declares --decisions, --decisions-timeout and --engine-python.
void declare_decisions(CLI::App& command, DecisionsOptions& options);

// Returns the interpreter that imports lockstep_engines, as the first words of a shell command.
// `option`, `named`: for error messages. Errors: the adapters or the interpreter do not exist. Not
// checked: that the interpreter has the engine installed.
Result<std::string> adapter_python(std::string_view option, std::string_view named);
// Returns the command that starts this project's adapter for `engine`, "vllm[:DIR]" or
// "sglang[:DIR]". DIR is a source tree that precedes the installed engine. `option`: where the
// engine was named.
Result<std::string> adapter_command(std::string_view option, const std::string& engine);
// Declares --conform and --audit-policy. REQUIRES: the command has --decisions.
void declare_checks(CLI::App& command, DecisionsOptions& options);
// Declares --audit-policy. `names`: the option's.
void declare_audit_policy(CLI::App& command, const std::string& names, std::string& policy);

// Returns the engines that the options name, with the first one started; null: the model decides.
// Errors: the engine does not start, or its first reply is not a valid `hello`.
Result<std::shared_ptr<ForeignEngines>> open_decisions(const DecisionsOptions& options);

// Returns a line that names the engine with which a saved case failed, if a different one decides
// now; else empty. `engine`: the model's profile, which decides if `engines` is null.
std::string decider_text(const std::optional<RecordedEngine>& decided_by, const std::string& engine,
                         const ForeignEngines* engines);

// Returns the nearest profile: for vLLM that of its release or of the nearest one, for another
// engine the default profile.
std::string profile_of(const ForeignEngines& engines);
// Returns how the engine is audited. vLLM is also checked for holding more blocks than it plans for
// a request; other engines plan differently.
AuditScope scope_of(const ForeignEngines& engines);
// Returns what a generated case must not contain: what the engine does not claim, what only the
// model can simulate (faults, a host tier), and what needs several ranks.
FeatureSet features_to_avoid(const EngineHello& hello);
// Returns the kinds of layers that the engine or worker does not claim.
FeatureSet layers_to_avoid(const EngineHello& hello);
// Restricts generated caches to the state modes, and the one pool per kind, that the engine or
// worker claims.
void limit_caches(const EngineHello& hello, GeneratorOptions& generator);

}  // namespace lockstep
