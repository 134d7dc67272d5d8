// lockstep engines
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <vector>

#include "cli/commands.h"
#include "cli/terminal.h"
#include "reference/profiles/policies.h"
#include "reference/profiles/releases.h"
#include "reference/types/engine_config.h"

namespace lockstep {
namespace {

void print_policies() {
  std::string_view chapter;
  for (const Policy& policy : policies()) {
    if (policy.chapter != chapter) fmt::print("\n{}\n", policy.chapter);
    chapter = policy.chapter;
    fmt::print("  {:<36}", policy.name);
    for (const PolicyChange& change : policy.history)
      fmt::print(
          "{}{}",
          change.release == releases().front().name ? "" : fmt::format("; {}: ", change.release),
          policy.word(change.value));
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
  for (const Release& release : releases())
    print_lines(fmt::format("Not modelled of {}:", release.name), release.not_modelled);
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
