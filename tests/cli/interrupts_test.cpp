// SIGINT and SIGTERM during long commands.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "tests/cli/command.h"

namespace lockstep::tests {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;
using Json = nlohmann::json;

constexpr auto kPatience = 60s;  // on a loaded machine

// `lockstep`, running; the test holds the other end of its standard input.
class Running {
 public:
  explicit Running(std::vector<std::string> words) {
    words.insert(words.begin(), LOCKSTEP_COMMAND);
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    EXPECT_EQ(pipe2(input_.data(), O_CLOEXEC), 0);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, input_[0], STDIN_FILENO);
    posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, out_.c_str(),
                                     O_WRONLY | O_CREAT | O_TRUNC, 0600);
    posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
    EXPECT_EQ(posix_spawn(&child_, argv[0], &actions, nullptr, argv.data(), environ), 0);
    posix_spawn_file_actions_destroy(&actions);
  }
  ~Running() {
    if (child_ > 0) {
      ::kill(child_, SIGKILL);
      wait();
    }
    for (const int end : input_) ::close(end);
  }

  // Returns once the command catches SIGINT and has worked for a while.
  void wait_until_it_works() const {
    const auto until = std::chrono::steady_clock::now() + kPatience;
    while (!catches(SIGINT) && std::chrono::steady_clock::now() < until)
      std::this_thread::sleep_for(5ms);
    EXPECT_TRUE(catches(SIGINT));
    std::this_thread::sleep_for(300ms);
  }
  void write(const std::string& text) const {
    EXPECT_EQ(::write(input_[1], text.data(), text.size()), std::ssize(text));
  }
  void send(int signal) const { ::kill(child_, signal); }
  int wait() {
    int status = 0;
    waitpid(std::exchange(child_, -1), &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }
  std::string out() const { return read_text(out_); }

 private:
  bool catches(int signal) const {
    std::ifstream file("/proc/" + std::to_string(child_) + "/status");
    for (std::string word; file >> word;)
      if (word == "SigCgt:" && file >> word)
        return (std::stoull(word, nullptr, 16) >> (signal - 1) & 1) != 0;
    return false;
  }

  std::string out_ = fresh_path("interrupted-stdout");
  std::array<int, 2> input_{};
  pid_t child_ = -1;
};

// A folder of many recordings, always the same.
std::string many_recordings(int count = 20'000) {
  const std::string folder = fresh_path("many");
  fs::create_directory(folder);
  const std::string one =
      LOCKSTEP_SOURCE_DIR "/tests/regressions/vllm_0_22_1_state_hit_longer.jsonl";
  for (int i = 0; i < count; ++i)
    fs::create_symlink(one, folder + "/" + std::to_string(i) + ".jsonl");
  return folder;
}

void expect_interrupted(std::vector<std::string> words, int signal) {
  const std::string command = words.front();
  const std::string json = fresh_path("interrupted.json");
  const std::string junit = fresh_path("interrupted.xml");
  words.insert(words.end(), {"--json", json, "--junit", junit});
  Running run(words);
  run.wait_until_it_works();
  run.send(signal);
  EXPECT_EQ(run.wait(), 128 + signal) << command << run.out();
  EXPECT_NE(run.out().find("Interrupted by SIG"), std::string::npos) << command << run.out();
  ASSERT_TRUE(fs::exists(json)) << command << run.out();
  EXPECT_EQ(Json::parse(read_text(json)).at("interrupted"), true) << command;
  EXPECT_NE(read_text(junit).find("name=\"interrupted\""), std::string::npos) << command;
}

TEST(Interrupts, TheFirstSignalEndsTheWorkAndLeavesEveryOutput) {
  const std::string many = many_recordings();
  for (const int signal : {SIGINT, SIGTERM}) {
    expect_interrupted({"fuzz", "--backend", "none", "--runs", "1000000"}, signal);
    expect_interrupted({"fuzz", "--backend", "simt", "--runs", "1000000", "--jobs", "3"}, signal);
    expect_interrupted({"mutants", "--cases", "1000000", "--jobs", "2"}, signal);
    expect_interrupted({"replay", kSample, "--backend", "simt", "--check", "check"}, signal);
    expect_interrupted({"relations", "--runs", "1000000"}, signal);
    expect_interrupted({"conform", many, "--jobs", "2"}, signal);
    expect_interrupted({"audit", many}, signal);
  }
}

// A recording that no combination of policies explains, so that `fit` tries them all.
std::string inexplicable_recording() {
  std::string text = read_text(sample_path("recordings/vllm-0.22.1/spec_decode_mamba/0016.jsonl"));
  const std::string key = "\"free_blocks\":";
  const std::size_t at = text.rfind(key) + key.size();
  text[at] = text[at] == '1' ? '2' : '1';
  const std::string path = fresh_path("inexplicable.jsonl");
  write_text(path, text);
  return path;
}

TEST(Interrupts, AComparisonOfEnginesShowsWhatItHasCompared) {
  const std::string model = LOCKSTEP_BINARY_DIR "/model_engine";
  std::vector<std::string> findings = {"findings", "--engine"};
  findings.insert(findings.end(), 1'000, model);
  expect_interrupted(findings, SIGINT);
  expect_interrupted({"fit", inexplicable_recording(), "--jobs", "1"}, SIGTERM);
  expect_interrupted({"fit", many_recordings()}, SIGINT);
  const std::string long_trace = fresh_path("long.jsonl");
  std::string lines;
  for (int i = 0; i < 10'000; ++i)
    lines += R"({"timestamp":0,"input_length":500,"output_length":2000,"hash_ids":[1]})"
             "\n";
  write_text(long_trace, lines);
  expect_interrupted({"diff-engines", long_trace}, SIGINT);
  expect_interrupted({"diff-engines", long_trace, "--engines", "vllm-0.22.1..vllm-0.33.0"},
                     SIGTERM);
  expect_interrupted({"pair", long_trace}, SIGINT);
}

TEST(Interrupts, AWorkerEndsAfterItsRecording) {
  const std::string json = fresh_path("worker.json");
  Running run({"worker", "worker:python3 " LOCKSTEP_SOURCE_DIR "/tests/engines/model_worker.py",
               many_recordings(500), "--json", json});
  run.wait_until_it_works();
  run.send(SIGTERM);
  EXPECT_EQ(run.wait(), 143) << run.out();
  EXPECT_NE(run.out().find("other files: interrupted by SIGTERM"), std::string::npos) << run.out();
  EXPECT_EQ(Json::parse(read_text(json)).size(), 1u);
}

TEST(Interrupts, AFuzzRunOnAnEngineEndsAfterItsCase) {
  expect_interrupted(
      {"fuzz", "--decisions", LOCKSTEP_BINARY_DIR "/model_engine", "--runs", "1000000"}, SIGTERM);
}

TEST(Interrupts, AnInterruptedReplayDoesNotSayThatItAgreed) {
  Running run({"replay", kSample, "--backend", "simt", "--check", "check"});
  run.wait_until_it_works();
  run.send(SIGINT);
  EXPECT_EQ(run.wait(), 130);
  EXPECT_NE(run.out().find("Verdict: none. Interrupted after "), std::string::npos) << run.out();
  EXPECT_EQ(run.out().find("Verdict: agreed"), std::string::npos) << run.out();
}

TEST(Interrupts, AnAuditOfAStreamEndsWhileItWaitsForTheNextStep) {
  const std::string json = fresh_path("stream.json");
  Running run({"audit", "-", "--json", json});
  std::ifstream recording(LOCKSTEP_SOURCE_DIR
                          "/tests/regressions/vllm_0_22_1_state_hit_longer.jsonl");
  std::string line;
  for (int lines = 0; lines < 3 && std::getline(recording, line); ++lines) run.write(line + "\n");
  run.wait_until_it_works();
  run.send(SIGTERM);
  EXPECT_EQ(run.wait(), 143) << run.out();
  const Json said = Json::parse(read_text(json));
  EXPECT_EQ(said.at("interrupted"), true);
  EXPECT_EQ(said.at("steps"), 2);
  EXPECT_EQ(said.at("clean"), 0) << "a part of a recording is not clean";
}

TEST(Interrupts, AnInterruptedShardIsNotMerged) {
  const std::string json = fresh_path("shard.json");
  Running run({"fuzz", "--backend", "none", "--runs", "1000000", "--shard", "0/2", "--json", json});
  run.wait_until_it_works();
  run.send(SIGTERM);
  EXPECT_EQ(run.wait(), 143);
  const Outcome merged = run_lockstep({"fuzz", "--merge", json});
  EXPECT_EQ(merged.status, 2);
  EXPECT_NE(merged.err.find("shard 0/2 was interrupted after "), std::string::npos) << merged.err;
}

TEST(Interrupts, AFifoWithoutAWriterDoesNotKeepTheSignal) {
  const std::string fifo = fresh_path("fifo");
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  Running run({"fuzz", "--merge", fifo});
  run.wait_until_it_works();
  run.send(SIGTERM);
  // The second signal ends a command that still waits, with the same status.
  std::this_thread::sleep_for(1s);
  EXPECT_NE(run.out().find("Interrupted by SIGTERM"), std::string::npos);
  run.send(SIGTERM);
  EXPECT_EQ(run.wait(), 143);
}

TEST(Interrupts, AFifoWithoutAReaderEndsAtTheSignal) {
  const std::string fifo = fresh_path("fifo");
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  Running run({"replay", kSample, "--backend", "none", "--hashes", fifo});
  run.wait_until_it_works();
  run.send(SIGTERM);
  EXPECT_EQ(run.wait(), 143);
}

// `timeout` signals the process and then its group: one signal, seen twice.
TEST(Interrupts, TheTwoSignalsOfTimeoutAreOne) {
  const std::string json = fresh_path("timeout.json");
  const Outcome outcome =
      run_program("/usr/bin/timeout", {"--preserve-status", "5", LOCKSTEP_COMMAND, "fuzz",
                                       "--backend", "none", "--runs", "1000000", "--json", json});
  EXPECT_EQ(outcome.status, 143);
  EXPECT_EQ(Json::parse(read_text(json)).at("interrupted"), true);
}

TEST(Interrupts, TheSecondSignalEndsTheCommandAndItsEngineAtOnce) {
  const std::string pid_path = fresh_path("engine-pid");
  Running run({"fuzz", "--runs", "1", "--decisions-timeout", "600", "--decisions",
               "echo $$ > '" + pid_path + "'; sleep 1000 & wait"});
  run.wait_until_it_works();
  const auto until = std::chrono::steady_clock::now() + kPatience;
  while (read_text(pid_path).empty() && std::chrono::steady_clock::now() < until)
    std::this_thread::sleep_for(5ms);
  run.send(SIGINT);
  std::this_thread::sleep_for(300ms);
  const auto second = std::chrono::steady_clock::now();
  run.send(SIGTERM);
  EXPECT_EQ(run.wait(), 143);
  EXPECT_LT(std::chrono::steady_clock::now() - second, 10s);
  // Gone, or dead and not yet reaped.
  const std::string path = "/proc/" + std::to_string(std::stoi(read_text(pid_path))) + "/stat";
  const auto is_alive = [&path] {
    const std::string stat = read_text(path);
    return !stat.empty() && stat.find(") Z ") == std::string::npos;
  };
  while (is_alive() && std::chrono::steady_clock::now() < second + kPatience)
    std::this_thread::sleep_for(5ms);
  EXPECT_FALSE(is_alive()) << read_text(path);
}

}  // namespace
}  // namespace lockstep::tests
