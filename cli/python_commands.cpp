// lockstep watch, lockstep campaign: commands that are Python programs. They pass all their
// arguments on, --help included.
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "base/data_root.h"
#include "cli/commands.h"
#include "cli/options/decisions_option.h"
#include "cli/output/terminal.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

// Replaces this process by `shell_words`, which /bin/sh splits, and the command's arguments, which
// it does not. LOCKSTEP names this program, for the Python code that calls it. Returns only an
// error.
Result<int> become(const std::string& shell_words, const CLI::App& command) {
  std::vector<std::string> words = {"sh", "-c", "exec env " + shell_words + " \"$@\"", "lockstep"};
  for (const std::string& word : command.remaining()) words.push_back(word);
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  std::error_code error;
  ::setenv("LOCKSTEP", fs::read_symlink("/proc/self/exe", error).c_str(), 1);
  ::execvp(arguments[0], arguments.data());
  return fail(fmt::format("sh: {}", std::strerror(errno)));
}

Result<int> watch(const CLI::App& command) {
  const fs::path script = data_root() / "python" / "watch.py";
  if (!fs::exists(script))
    return fail("watch needs python/tests: run `./run watch` in a clone of Lockstep");
  return become("python3 " + shell_word(script.string()), command);
}

Result<int> campaign(const CLI::App& command) {
  LS_ASSIGN_OR_RETURN(const std::string python, adapter_python("campaign", "with Python"));
  return become(python + " -m lockstep_campaign", command);
}

// prefix_command(): CLI11 parses no argument after the command's name. Without its help flag,
// --help reaches Python.
void add_one(CLI::App& app, int& exit_code, Result<int> (*run)(const CLI::App&),
             const std::string& name, const std::string& help) {
  CLI::App* command = app.add_subcommand(name, help);
  command->prefix_command();
  command->set_help_flag();
  command->callback([=, &exit_code] { exit_code = exit_status(run(*command)); });
}

}  // namespace

void add_python_commands(CLI::App& app, int& exit_code) {
  add_one(app, exit_code, watch, "watch",
          "Write one page about a new release of vLLM or SGLang: what changed, and what to do");
  add_one(app, exit_code, campaign, "campaign",
          "Spread a fuzz run over processes or a Ray cluster, with one report and page");
}

}  // namespace lockstep
