#include "cli/output/again.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <cstdlib>

#include "cli/options/output_option.h"

namespace lockstep {
namespace {

// Characters without a meaning for /bin/sh in an argument. "~" and "!" are not among them.
bool is_plain(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 ||
         std::string_view("_@%+=:,./-").find(c) != std::string_view::npos;
}

bool holds(const std::vector<std::string>& names, const std::string& name) {
  return std::ranges::find(names, name) != names.end();
}

// True for positional arguments, which are added separately, for outputs, for --annotations, which
// only a CI page reads, and for what the change leaves out or replaces.
bool is_left_out(const CLI::Option& option, const AgainChange& change) {
  if (option.count() == 0 || option.get_positional() || names_output(option)) return true;
  const std::string name = option.get_name();
  return name == "--annotations" || holds(change.without, name) ||
         (!change.only.empty() && !holds(change.only, name)) ||
         std::ranges::find(change.set, name, &std::pair<std::string, std::string>::first) !=
             change.set.end();
}

std::string words_of(const CLI::Option& option) {
  std::string text = " " + option.get_name();
  if (option.get_items_expected_max() == 0) return text;  // a flag
  for (const std::string& value : option.results())
    if (!value.empty()) text += " " + shell_word(value);
  return text;
}

// Returns the environment variables that choose an engine's interpreter and adapters, if the
// options name an engine.
std::string environment_of(const std::string& options) {
  if (options.find("vllm") == std::string::npos && options.find("sglang") == std::string::npos &&
      options.find("--kernels") == std::string::npos)
    return {};
  std::string text;
  for (const char* name : {"LOCKSTEP_PYTHON", "LOCKSTEP_PYTHONPATH"})
    if (const char* value = std::getenv(name); value != nullptr && *value != '\0')
      text += std::string(name) + "=" + shell_word(value) + " ";
  return text;
}

}  // namespace

std::string shell_word(std::string_view text) {
  if (!text.empty() && std::ranges::all_of(text, is_plain)) return std::string(text);
  // Inside single quotes only the quote itself has a meaning: it is closed, escaped and opened
  // again.
  std::string result = "'";
  for (const char c : text) result += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return result + "'";
}

std::string again_text(const CLI::App& command, const AgainChange& change) {
  std::vector<std::string> arguments = change.arguments;
  std::string options;
  std::string engine;  // options that may name one
  for (const CLI::Option* option : command.get_options()) {
    if (option->get_positional() && change.arguments.empty())
      arguments.insert(arguments.end(), option->results().begin(), option->results().end());
    if (is_left_out(*option, change)) continue;
    options += words_of(*option);
    if (holds({"--decisions", "--backend", "--kernels"}, option->get_name()))
      engine += words_of(*option);
  }
  for (const auto& [name, value] : change.set) options += " " + name + " " + shell_word(value);
  std::string text = environment_of(engine) + "lockstep " +
                     (change.command.empty() ? command.get_name() : change.command);
  for (const std::string& argument : arguments) text += " " + shell_word(argument);
  return text + options;
}

std::string again_of_case(const CLI::App& command, const std::string& name,
                          const std::string& path) {
  std::vector<std::string> only = {"--decisions",     "--decisions-timeout",
                                   "--engine-python", "--conform",
                                   "--audit-policy",  "--runner",
                                   "--states",        "--plant"};
  const CLI::Option* backend = command.get_option_no_throw("--backend");
  // A saved case stores the name of a built-in backend, but a path may differ on another machine.
  const bool is_built_in = backend != nullptr && backend->count() == 1 &&
                           holds({"auto", "simt", "cuda", "none"}, backend->results().front());
  if (!is_built_in) only.push_back("--backend");
  return again_text(command, {.command = name, .arguments = {path}, .only = std::move(only)});
}

}  // namespace lockstep
