// lockstep engines
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <vector>

#include "cli/commands.h"
#include "cli/terminal.h"
#include "reference/profiles/engine_profile.h"
#include "reference/types/engine_config.h"

namespace lockstep {
namespace {

void print_policies() {
  std::vector<std::vector<PolicyText>> columns;
  for (const EngineProfile& profile : engine_profiles()) columns.push_back(policies_of(profile));
  fmt::print("\n{:<38}", "Policy");
  for (const EngineProfile& profile : engine_profiles()) fmt::print("{:<24}", profile.name);
  fmt::print("\n");
  for (std::size_t row = 0; row < columns[0].size(); ++row) {
    fmt::print("  {:<36}", columns[0][row].name);
    for (const auto& column : columns) fmt::print("{:<24}", column[row].value);
    fmt::print("\n");
  }
}

void print_lines(std::string_view title, std::span<const std::string_view> lines) {
  fmt::print("\n{}\n", title);
  for (const std::string_view line : lines) fmt::print("  - {}\n", line);
}

int show_engines() {
  fmt::print("Engine profiles: `--engine NAME` decides as that release does.\n");
  for (const EngineProfile& profile : engine_profiles()) {
    const bool is_default = profile.name == EngineConfig{}.engine;
    fmt::print("  {}{}\n", profile.name, is_default ? "  (the default)" : "");
  }
  print_policies();
  print_lines("Modelled under every profile:", modelled());
  for (const EngineProfile& profile : engine_profiles())
    print_lines(fmt::format("Not modelled of {}:", profile.name), profile.not_modelled);
  fmt::print("\ndocs/engines.md says what each policy means, and which recordings show it.\n");
  return kExitAgreed;
}

}  // namespace

void add_engines_command(CLI::App& app, int& exit_code) {
  CLI::App* command =
      app.add_subcommand("engines", "List the engine profiles and what is modelled of each");
  command->callback([&exit_code] { exit_code = show_engines(); });
}

}  // namespace lockstep
