// `lockstep bisect` from the outside.
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <thread>

#include "tests/cli/command.h"

namespace lockstep::tests {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;
using Json = nlohmann::json;

const std::string kRegressions = LOCKSTEP_SOURCE_DIR "/tests/regressions/";
const std::string kPlain = "python3 " LOCKSTEP_SOURCE_DIR "/docs/examples/paged_engine.py";
const std::string kInFolder = "python3 {dir}/engine.py";

void expect_said(const Outcome& outcome, const std::string& part) {
  EXPECT_NE(outcome.out.find(part), std::string::npos) << part << "\n"
                                                       << outcome.out << outcome.err;
}

bool shell(const std::string& command) { return std::system(command.c_str()) == 0; }

// A case that fails when the small engine loses a block.
const std::string& lost_block_case() {
  static const std::string path = [] {
    const std::string folder = fresh_path("lost");
    const Outcome fuzzed = run_lockstep({"fuzz", "--decisions", kPlain + " --bug lost", "--runs",
                                         "40", "--failures", "1", "--save", folder});
    EXPECT_EQ(fuzzed.status, 1) << fuzzed.err;
    for (const auto& entry : fs::directory_iterator(folder))
      if (entry.path().string().ends_with(".min.case.jsonl")) return entry.path().string();
    ADD_FAILURE() << fuzzed.out;
    return std::string();
  }();
  return path;
}

// Eight commits of the small engine with the tags c1 to c8. Since c5 it loses blocks; c4 does not
// import. A branch whose commit raises is merged as c6.
std::string engine_history() {
  std::string folder = fresh_path("history");
  const std::string script = R"(set -e
mkdir -p "$1"; cd "$1"; git init -q; git symbolic-ref HEAD refs/heads/trunk
export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b
put() { sed "s/^BUG = .*/BUG = \"$2\"/" "$engine" > engine.py; echo "# $1" >> engine.py; }
keep() { git add engine.py; git commit -q --no-gpg-sign -m "change $1"; git tag "c$1"; }
for i in 1 2 3; do put $i ""; keep $i; done
echo 'import nothing_of_that_name' > engine.py; keep 4
put 5 lost; keep 5
git checkout -q -b side; echo 'raise SystemExit' > engine.py; git commit -qam "side"
git checkout -q trunk; git merge -q --no-commit --no-ff -s ours side >/dev/null; put 6 lost; keep 6
for i in 7 8; do put $i lost; keep $i; done
)";
  write_text(temporary_path("history.sh"), script);
  EXPECT_TRUE(shell("engine='" LOCKSTEP_SOURCE_DIR "/docs/examples/paged_engine.py' sh '" +
                    temporary_path("history.sh") + "' '" + folder + "'"));
  return folder;
}

TEST(Bisect, OverReleasesNamesTheReleaseThePolicyAndBothVerdicts) {
  const std::string json_path = temporary_path("bisect.json");
  const Outcome outcome =
      run_lockstep({"bisect", kRegressions + "states_in_flight_never_end.case.jsonl",
                    "vllm-0.24.0..vllm-0.33.0", "--backend", "none", "--json", json_path});
  EXPECT_EQ(outcome.status, 1) << outcome.err;
  expect_said(outcome, "First with a different verdict: vllm-0.26.0\n  vllm-0.25.1: agreed\n");
  expect_said(outcome, "retire_basis = processed alone: liveness step 1024");
  const Json json = Json::parse(read_text(json_path));
  EXPECT_EQ(json.at("first").at("name"), "vllm-0.26.0");
  EXPECT_EQ(json.at("first").at("verdict").at("check"), "liveness");
  EXPECT_EQ(json.at("before").at("verdict").at("kind"), "agreed");
  ASSERT_EQ(json.at("policies").size(), 1u);
  // The switched policy is the cause: the engine that it names fails the same way.
  const std::string engine = json.at("policies").at(0).at("engine");
  EXPECT_EQ(engine, "vllm-0.25.1,retire_basis=processed");
  EXPECT_LT(json.at("judged").get<int>(), json.at("candidates").get<int>());
}

TEST(Bisect, OverReleasesNamesThePoliciesThatOnlyTogetherChangeTheVerdict) {
  const Outcome outcome =
      run_lockstep({"bisect", kRegressions + "load_waits_for_room_for_drafts.case.jsonl",
                    "vllm-0.22.1..vllm-0.33.0", "--backend", "none"});
  EXPECT_EQ(outcome.status, 1) << outcome.err;
  expect_said(outcome, "No single policy explains it");
  expect_said(outcome, "loads_leave_room = no restored: agreed");
  expect_said(outcome, "Skipped: vllm-0.28.0");
  expect_said(outcome, "The first may be a skipped one between vllm-0.22.1 and vllm-0.33.0.");
}

TEST(Bisect, OfACaseThatFailsAtOneEndFollowsTheFailureAndNotItsSymptom) {
  const Outcome outcome =
      run_lockstep({"bisect", kRegressions + "state_hit_leaves_null_blocks.case.jsonl",
                    "vllm-0.22.1..vllm-0.33.0", "--backend", "none"});
  EXPECT_EQ(outcome.status, 1) << outcome.err;
  // In 0.24.0 another check fails; 0.26.0 is the first that agrees.
  expect_said(outcome, "First with a different verdict: vllm-0.26.0\n  vllm-0.25.1: invariant.");
  expect_said(outcome, "vllm-0.26.0: agreed\n  searches_states_within_hit = yes alone: agreed");
}

TEST(Bisect, EndsWithZeroWhereBothEndsAgree) {
  const Outcome outcome =
      run_lockstep({"bisect", kRegressions + "states_in_flight_never_end.case.jsonl",
                    "vllm-0.26.0..vllm-0.33.0", "--backend", "none"});
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  expect_said(outcome, "vllm-0.26.0 and vllm-0.33.0 agree: liveness");
}

TEST(Bisect, OfARecordingTheModelDecides) {
  const Outcome outcome =
      run_lockstep({"bisect", kRegressions + "vllm_0_22_1_reset_drops_later_output.jsonl",
                    "vllm-0.22.1..vllm-0.33.0", "--backend", "none"});
  EXPECT_EQ(outcome.status, 1) << outcome.err;
  expect_said(outcome, "First with a different verdict: vllm-0.27.1\n  vllm-0.26.0: audit.sampled");
  expect_said(outcome, "in_flight_accounting = tokens alone: agreed");
}

TEST(Bisect, OverAHistoryNamesTheFirstBadCommitAndSkipsWhatDoesNotImport) {
  const std::string repository = engine_history();
  const std::string json_path = temporary_path("bisect.json");
  const Outcome outcome = run_lockstep({"bisect", lost_block_case(), kInFolder, "c1..c8", "--repo",
                                        repository, "--json", json_path});
  EXPECT_EQ(outcome.status, 1) << outcome.err;
  expect_said(outcome, " change 5\n");
  expect_said(outcome, "Skipped: ");
  expect_said(outcome, "No module named 'nothing_of_that_name'");
  const Json json = Json::parse(read_text(json_path));
  EXPECT_EQ(json.at("candidates"), 8);  // of the first parents, without the side
  EXPECT_EQ(json.at("before").at("subject"), "change 3");
  EXPECT_EQ(json.at("before").at("verdict").at("kind"), "agreed");
  EXPECT_EQ(json.at("first").at("subject"), "change 5");
  EXPECT_EQ(json.at("first").at("verdict").at("kind"), "violation");
  EXPECT_TRUE(shell("test \"$(git -C '" + repository +
                    "' rev-parse c5)\" = " + json.at("commit").get<std::string>()));
  EXPECT_TRUE(shell("test -z \"$(git -C '" + repository + "' status --porcelain)\""));
  const Outcome same =
      run_lockstep({"bisect", lost_block_case(), kInFolder, "c5..c8", "--repo", repository});
  EXPECT_EQ(same.status, 0) << same.out << same.err;
}

TEST(Bisect, OverAHistoryRefusesEndsThatCannotBeJudgedAndNamesTheReason) {
  const std::string repository = engine_history();
  const struct {
    std::vector<std::string> words;
    std::string reason;
  } refused[] = {
      {{kInFolder, "c4..c8", "--repo", repository}, "nothing_of_that_name"},
      {{kInFolder, "c8..c1", "--repo", repository}, "c8 is not an ancestor of c1"},
      {{kInFolder, "c1..nowhere", "--repo", repository}, "nowhere is not a commit"},
      {{kInFolder, "c1..c1", "--repo", repository}, "the same commit"},
      {{kInFolder, "c1", "--repo", repository}, "expected GOOD..BAD"},
      {{kInFolder, "c1..c8"}, "--repo"},
      {{"python3 engine.py", "c1..c8", "--repo", repository}, "{dir}"},
      {{"c1..c8"}, "expected two of these"},
  };
  for (const auto& [words, reason] : refused) {
    std::vector<std::string> arguments = {"bisect", lost_block_case()};
    arguments.insert(arguments.end(), words.begin(), words.end());
    const Outcome outcome = run_lockstep(arguments);
    EXPECT_EQ(outcome.status, 2) << reason << outcome.out;
    EXPECT_NE(outcome.err.find(reason), std::string::npos) << reason << "\n" << outcome.err;
  }
}

// Whatever ends the command: by itself, one SIGTERM, two of them, or SIGKILL.
TEST(Bisect, LeavesNoTemporaryFolder) {
  const std::string repository = engine_history();
  const std::vector<int> ends[] = {{}, {SIGTERM}, {SIGTERM, SIGTERM}, {SIGKILL}};
  for (const std::vector<int>& signals : ends) {
    const std::string temporary = fresh_path("tmp");
    fs::create_directory(temporary);
    std::vector<std::string> words = {"env",
                                      "TMPDIR=" + temporary,
                                      LOCKSTEP_COMMAND,
                                      "bisect",
                                      lost_block_case(),
                                      "sleep 1; " + kInFolder,
                                      "c1..c8",
                                      "--repo",
                                      repository};
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    pid_t child = -1;
    ASSERT_EQ(posix_spawnp(&child, "env", nullptr, nullptr, argv.data(), environ), 0);
    const auto eventually = [](const std::function<bool()>& holds) {
      for (int i = 0; i < 600 && !holds(); ++i) std::this_thread::sleep_for(50ms);
      return holds();
    };
    EXPECT_TRUE(eventually([&] { return !fs::is_empty(temporary); }));
    for (const int signal : signals) {
      ::kill(child, signal);
      std::this_thread::sleep_for(300ms);  // a signal within 200 ms is the same one
    }
    int status = 0;
    waitpid(child, &status, 0);
    const bool is_killed = !signals.empty() && signals.front() == SIGKILL;
    if (!is_killed) {
      EXPECT_EQ(WEXITSTATUS(status), signals.empty() ? 1 : 128 + SIGTERM);
    }
    EXPECT_TRUE(eventually([&] { return fs::is_empty(temporary); })) << signals.size();
  }
}

}  // namespace
}  // namespace lockstep::tests
