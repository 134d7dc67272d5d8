// The program `lockstep`: parses the arguments, runs one command and returns its exit status.
// Everything else is in the libraries.
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <span>
#include <string>
#include <vector>

#include "base/output_file.h"
#include "cli/commands.h"
#include "cli/options/output_option.h"
#include "cli/output/terminal.h"

namespace {

std::string version_text() {
#ifdef LOCKSTEP_CUDA_VERSION
  return "lockstep " LOCKSTEP_VERSION " (CUDA " LOCKSTEP_CUDA_VERSION ")";
#else
  return "lockstep " LOCKSTEP_VERSION " (without CUDA: kernels run on the CPU)";
#endif
}

// Opens the standard streams that the caller has closed. Otherwise the next opened file would get
// descriptor 1 or 2, and printed text would be written into it. /dev/full for standard output:
// printing then fails and is reported, instead of disappearing.
void open_closed_streams() {
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (::fcntl(fd, F_GETFD) < 0) ::open(fd == STDOUT_FILENO ? "/dev/full" : "/dev/null", O_RDWR);
}

// Returns the label that the help shows for a CLI11 type: "N" for "INT:INT in [1 - 4096]", "a|b"
// for "TEXT:{a,b}". The range is dropped because an error message states it when a value is
// outside.
std::string label_of(const std::string& type) {
  const std::size_t colon = type.find(':');
  std::string name = type.substr(0, colon);
  const std::string check = colon == type.npos ? "" : type.substr(colon + 1);
  if (name == "INT" || name == "UINT" || name == "FLOAT") name = "N";
  if (!check.starts_with('{') || !check.ends_with('}')) return name;
  std::string words = check.substr(1, check.size() - 2);
  std::replace(words.begin(), words.end(), ',', '|');
  return words;
}

// Labels the types of all options, subcommands included. Runs only before help or an error is
// printed.
void label_types(CLI::App& app) {
  for (CLI::App* command : app.get_subcommands([](CLI::App*) { return true; })) {
    label_types(*command);
    for (const CLI::Option* option : command->get_options())
      if (const std::string type = option->get_type_name(); !type.empty())
        app.get_formatter()->label(type, label_of(type));
  }
}

// Refuses "--option=": CLI11 would take the next argument as its value. Commands in Python parse
// their arguments themselves.
void check_arguments(const CLI::App& app, std::span<char* const> arguments) {
  const auto is_python = [&](const CLI::App* command) {
    return command->get_prefix_command() && command->get_name() == arguments[1];
  };
  if (arguments.size() < 2 || !app.get_subcommands(is_python).empty()) return;
  for (const std::string argument : arguments)
    if (argument.starts_with("--") && argument.ends_with('='))
      throw CLI::ValidationError(argument.substr(0, argument.size() - 1), "empty value");
}

// True for an option that takes numbers.
bool takes_numbers(const CLI::Option& option) {
  const std::string type = label_of(option.get_type_name());
  return type == "N" || type == "S" || type == "P";
}

// Makes all numbers decimal: CLI11 takes 010 for octal 8 and refuses 08.
void drop_leading_zeros(CLI::App& app) {
  const auto drop = [](std::string& value) {
    const auto is_digit = [&](std::size_t at) {
      return at < value.size() && std::isdigit(value[at]);
    };
    const std::size_t first = value.starts_with('-') || value.starts_with('+') ? 1 : 0;
    while (is_digit(first + 1) && value[first] == '0') value.erase(first, 1);
    return std::string();
  };
  for (CLI::App* command : app.get_subcommands([](CLI::App*) { return true; }))
    for (CLI::Option* option : command->get_options())
      if (takes_numbers(*option)) option->transform(CLI::Validator(drop, ""));
}

// Refuses an empty value, most often an unset variable of a shell: many options treat it as absent
// and would silently do something else. An option whose value is optional takes it as its default.
// Also refuses NaN for a number: NaN passes every check of a range.
void check_values(const CLI::App& command) {
  for (const CLI::Option* option : command.get_options()) {
    if (option->count() == 0 || option->get_items_expected_min() == 0) continue;
    for (const std::string& value : option->results()) {
      if (value.empty()) throw CLI::ValidationError(option->get_name(), "empty value");
      if (takes_numbers(*option) && std::isnan(std::strtod(value.c_str(), nullptr)))
        throw CLI::ValidationError(option->get_name(), value + " is not a number");
    }
  }
}

// Returns `status`, or kExitRefused if standard output did not accept everything: a result that was
// lost must not look like success. A command that is refused has said why.
int finish(int status) {
  std::cout.flush();
  const auto written = lockstep::finish_standard_output();
  return written || status == lockstep::kExitRefused ? status
                                                     : lockstep::refuse(written.error().message);
}

}  // namespace

int main(int argc, char** argv) {
  open_closed_streams();
  std::signal(SIGXFSZ, SIG_IGN);  // a limit of file sizes is an error of write(), with a message
  CLI::App app(
      "Replays request traces through a reference model of an LLM serving engine's paged KV cache\n"
      "and through real kernels side by side, and compares every step.",
      "lockstep");
  app.set_version_flag("--version", version_text());
  app.require_subcommand(1);
  app.footer(
      "Exit status: 0 agreed; 1 divergence, violation or mismatch; 2 input refused;\n"
      "3 requests wait forever; 4 a saved failure is not reproduced.\n"
      "`lockstep COMMAND --help` lists its options.");

  int exit_code = lockstep::kExitAgreed;
  lockstep::add_demo_command(app, exit_code);
  lockstep::add_replay_command(app, exit_code);
  lockstep::add_pair_command(app, exit_code);
  lockstep::add_conform_command(app, exit_code);
  lockstep::add_model_command(app, exit_code);
  lockstep::add_layout_command(app, exit_code);
  lockstep::add_capacity_command(app, exit_code);
  lockstep::add_fit_command(app, exit_code);
  lockstep::add_audit_command(app, exit_code);
  lockstep::add_export_command(app, exit_code);
  lockstep::add_engines_command(app, exit_code);
  lockstep::add_diff_engines_command(app, exit_code);
  lockstep::add_same_command(app, exit_code);
  lockstep::add_shrink_command(app, exit_code);
  lockstep::add_explain_command(app, exit_code);
  lockstep::add_bisect_command(app, exit_code);
  lockstep::add_mutants_command(app, exit_code);
  lockstep::add_relations_command(app, exit_code);
  lockstep::add_fuzz_command(app, exit_code);
  lockstep::add_worker_command(app, exit_code);
  lockstep::add_findings_command(app, exit_code);
  lockstep::add_check_adapter_command(app, exit_code);
  lockstep::add_python_commands(app, exit_code);

  // CLI11 would report an unknown command as a surplus argument; this message lists the commands.
  if (argc > 1 && argv[1][0] != '-') {
    std::vector<std::string> known;
    for (const CLI::App* command : app.get_subcommands([](CLI::App*) { return true; }))
      known.push_back(command->get_name());
    if (std::find(known.begin(), known.end(), argv[1]) == known.end())
      return lockstep::refuse(
          fmt::format("unknown command {}; the commands are {}", argv[1], fmt::join(known, ", ")));
  }
  // Runs after all options are parsed and before the command.
  app.parse_complete_callback([&app] {
    for (const CLI::App* command : app.get_subcommands()) {
      check_values(*command);
      lockstep::check_outputs_differ(*command);
    }
  });
  drop_leading_zeros(app);
  try {
    check_arguments(app, {argv, static_cast<std::size_t>(argc)});
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    label_types(app);
    // CLI11 has exit codes of its own above 100; only "--help" and "--version" end with 0.
    return finish(app.exit(error) == 0 ? lockstep::kExitAgreed : lockstep::kExitRefused);
  } catch (const std::exception& error) {
    return lockstep::refuse(lockstep::text_of(error));
  }
  return finish(exit_code);
}
