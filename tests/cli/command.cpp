#include "tests/cli/command.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>

namespace lockstep::tests {
namespace {

namespace fs = std::filesystem;

// As exec wants them: pointers into `words`, a null behind the last.
std::vector<char*> pointers_to(std::vector<std::string>& words) {
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  return pointers;
}

}  // namespace

std::string sample_path(std::string_view name) {
  return fs::path(LOCKSTEP_SOURCE_DIR) / "traces/samples" / name;
}

std::string read_text(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

std::string replaced(std::string text, const std::string& found, const std::string& better) {
  const std::size_t at = text.find(found);
  EXPECT_NE(at, std::string::npos) << found;
  return at == std::string::npos ? text : text.replace(at, found.size(), better);
}

void write_text(const std::string& path, std::string_view text) {
  std::ofstream(path, std::ios::binary) << text;
}

std::string trace_of(const std::vector<std::string>& records) {
  std::string text = R"({"lockstep_trace":1,"time":"ns","source":{"kind":"test","name":""}})"
                     "\n";
  for (const std::string& record : records) text += record + "\n";
  return text + R"({"end":true,"records":)" + std::to_string(records.size()) + "}\n";
}

Outcome run_lockstep(const std::vector<std::string>& arguments) {
  return run_program(LOCKSTEP_COMMAND, arguments);
}

Outcome run_program(const std::string& program, const std::vector<std::string>& arguments,
                    std::vector<std::string> environment) {
  std::vector<std::string> words = {program};
  words.insert(words.end(), arguments.begin(), arguments.end());
  const std::vector<char*> argv = pointers_to(words);
  const std::vector<char*> envp = pointers_to(environment);

  const std::string out = temporary_path("stdout");
  const std::string err = temporary_path("stderr");
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  constexpr int kFlags = O_WRONLY | O_CREAT | O_TRUNC;
  posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, out.c_str(), kFlags, 0600);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, err.c_str(), kFlags, 0600);
  pid_t child = 0;
  const int failed = posix_spawn(&child, argv[0], &actions, nullptr, argv.data(),
                                 environment.empty() ? environ : envp.data());
  posix_spawn_file_actions_destroy(&actions);
  Outcome outcome;
  if (failed != 0) {
    ADD_FAILURE() << "cannot start " << program;
    return outcome;
  }
  int status = 0;
  waitpid(child, &status, 0);
  outcome.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  outcome.out = read_text(out);
  outcome.err = read_text(err);
  return outcome;
}

}  // namespace lockstep::tests
