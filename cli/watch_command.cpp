// lockstep watch vllm==RELEASE: python/watch.py of a clone, with this program.
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "base/data_root.h"
#include "cli/commands.h"
#include "cli/options/output_option.h"
#include "cli/output/terminal.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

struct WatchOptions {
  std::string release, folder, json_path;
  int seeds = 20, runs = 300;
};

// The script takes this process over.
Result<int> watch(const WatchOptions& options) {
  const fs::path script = data_root() / "python" / "watch.py";
  std::error_code error;
  if (!fs::exists(script, error))
    return fail("watch records with python/tests: run it in a clone of Lockstep, as `./run watch`");
  std::vector<std::string> words = {"python3", script, options.release,
                                    fmt::format("--seeds={}", options.seeds),
                                    fmt::format("--runs={}", options.runs)};
  if (!options.folder.empty()) words.push_back("--out=" + options.folder);
  if (!options.json_path.empty()) words.push_back("--json=" + options.json_path);
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  ::setenv("LOCKSTEP", fs::read_symlink("/proc/self/exe", error).c_str(), 1);
  ::execvp(arguments[0], arguments.data());
  return fail(fmt::format("python3: {}", std::strerror(errno)));
}

}  // namespace

void add_watch_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<WatchOptions>();
  CLI::App* command = app.add_subcommand(
      "watch", "Write one page about a new release of vLLM: what changed, and what to do");
  command->add_option("RELEASE", options->release, "vllm==X, from the package index of pip")
      ->required();
  declare_output_folder(*command, "--out", options->folder,
                        "folder of the page and the recordings (vllm-X)");
  command->add_option("--seeds", options->seeds, "scenarios of each family")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  command->add_option("--runs", options->runs, "generated cases of each kind")
      ->check(CLI::Range(1, 1'000'000))
      ->capture_default_str();
  declare_output(*command, "--json", options->json_path, "the page as JSON");
  command->callback([options, &exit_code] { exit_code = exit_status(watch(*options)); });
}

}  // namespace lockstep
