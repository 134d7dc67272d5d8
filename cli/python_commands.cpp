// Commands that Python runs: lockstep watch. They pass all their words on.
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
#include "cli/output/again.h"
#include "cli/output/terminal.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

// Replaces this process with `shell_words` and the words that follow the command; returns if that
// fails.
Result<int> become(const std::string& shell_words, const CLI::App& command) {
  std::vector<std::string> words = {"sh", "-c", "exec env " + shell_words + " \"$@\"", "lockstep"};
  const std::vector<std::string> remaining = command.remaining();
  words.insert(words.end(), remaining.begin(), remaining.end());
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
  std::error_code error;
  if (!fs::exists(script, error))
    return fail("watch records with python/tests: run it in a clone of Lockstep, as `./run watch`");
  return become("python3 " + shell_word(script.string()), command);
}

void add_python_command(CLI::App& app, int& exit_code, Result<int> (*run)(const CLI::App&),
                        const std::string& name, const std::string& help) {
  CLI::App* command = app.add_subcommand(name, help);
  command->prefix_command();
  command->set_help_flag();
  command->callback([=, &exit_code] { exit_code = exit_status(run(*command)); });
}

}  // namespace

void add_python_commands(CLI::App& app, int& exit_code) {
  add_python_command(app, exit_code, watch, "watch",
                     "Write one page about a new release of vLLM: what changed, and what to do");
}

}  // namespace lockstep
