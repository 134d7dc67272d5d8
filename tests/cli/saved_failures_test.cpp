// The table of docs/commands.md, "A failure that was saved": each kind is planted, saved by `fuzz`,
// and judged again by every command. Without its cause it is not reproduced.
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "tests/cli/command.h"

namespace lockstep::tests {
namespace {

const std::string kPaged = "python3 " LOCKSTEP_SOURCE_DIR "/docs/examples/paged_engine.py";
const std::string kModel = LOCKSTEP_BINARY_DIR "/model_engine";

struct Planted {
  std::string name;
  std::vector<std::string> fuzz;  // options that plant it
  std::string check;              // by which it fails
  int status = 1;
  std::string engine = {};   // that decides; empty: the model
  std::string healthy = {};  // the same without the defect
};

const std::vector<Planted> kPlanted = {
    {"divergence", {"--mutant", "drop-slot", "--backend", "simt"}, "page_written"},
    {"audit",
     {"--mutant", "state-wrong-boundary", "--backend", "none", "--engine", "vllm-0.33.0"},
     "audit.state_read"},
    {"invariant", {"--mutant", "hash-stale"}, "invariant."},
    {"check", {"--mutant", "abort-twice", "--backend", "none"}, "engine.check"},
    {"liveness", {"--mutant", "admission-uncapped"}, "liveness", 3},
    {"decisions",
     {"--decisions", kPaged + " --bug lost"},
     "audit.conservation",
     1,
     kPaged + " --bug lost",
     kPaged},
    {"exception",
     {"--decisions", kPaged + " --bug raise"},
     "engine.exception",
     1,
     kPaged + " --bug raise",
     kPaged},
    {"reply",
     {"--decisions", kPaged + " --bug reply"},
     "engine.reply",
     1,
     kPaged + " --bug reply",
     kPaged},
    {"conform",
     {"--decisions", kModel, "--engine", "vllm-0.33.0", "--conform"},
     "conform.",
     1,
     kModel},
};

class SavedFailures : public testing::TestWithParam<Planted> {};

std::string saved_by_fuzzing(const Planted& planted) {
  const std::string folder = fresh_path("saved_" + planted.name);
  std::vector<std::string> arguments = {"fuzz", "--runs", "300",  "--failures",
                                        "1",    "--save", folder, "--no-shrink"};
  arguments.insert(arguments.end(), planted.fuzz.begin(), planted.fuzz.end());
  const Outcome found = run_lockstep(arguments);
  EXPECT_NE(found.status, 0) << found.out << found.err;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    if (read_text(entry.path()).find("\"check\":\"" + planted.check) != std::string::npos)
      return entry.path();
  ADD_FAILURE() << found.out;
  return {};
}

std::vector<std::string> judged_by(const std::string& command, const std::string& path,
                                   const std::string& engine) {
  std::vector<std::string> arguments = {command, path};
  if (!engine.empty()) arguments.insert(arguments.end(), {"--decisions", engine});
  return arguments;
}

TEST_P(SavedFailures, AreJudgedByWhatFailedThemInEveryCommand) {
  const Planted& planted = GetParam();
  const std::string path = saved_by_fuzzing(planted);
  ASSERT_FALSE(path.empty());
  for (const std::string command : {"replay", "explain", "shrink"}) {
    const Outcome again = run_lockstep(judged_by(command, path, planted.engine));
    EXPECT_EQ(again.status, planted.status) << command << again.out << again.err;
    EXPECT_NE(again.out.find(planted.check), std::string::npos) << command << again.out;
    EXPECT_EQ(again.out.find("NOT reproduced"), std::string::npos) << command << again.out;
  }
}

TEST_P(SavedFailures, AreNotReproducedWithoutTheirCause) {
  const Planted& planted = GetParam();
  std::string path = saved_by_fuzzing(planted);
  ASSERT_FALSE(path.empty());
  std::string text = read_text(path);
  if (planted.engine.empty()) {
    const std::string plants = "\"mutants\":[\"" + planted.fuzz[1] + "\"]";
    const std::size_t at = text.find(plants);
    ASSERT_NE(at, std::string::npos) << text.substr(0, 2000);
    path = temporary_path("mended.case.jsonl");
    write_text(path, text.replace(at, plants.size(), "\"mutants\":[]"));
  }
  const std::string junit = fresh_path("not_reproduced.xml");
  for (const std::string command : {"replay", "explain", "shrink"}) {
    std::vector<std::string> words = judged_by(command, path, planted.healthy);
    words.insert(words.end(), {"--junit", junit});
    const Outcome again = run_lockstep(words);
    EXPECT_NE(read_text(junit).find("\"reproduction\""), std::string::npos) << command;
    EXPECT_EQ(again.status, 4) << command << again.out << again.err;
    EXPECT_NE(again.out.find("NOT reproduced: it does not fail, and was saved as "),
              std::string::npos)
        << command << again.out;
  }
}

// One of each kind: a divergence, a failed check of the model and a violation before one, a
// deadlock of the queue and of ranks, a collective without a backend.
TEST(SavedMutants, AreReproducedByEveryCommand) {
  const std::string folder = fresh_path("saved_mutants");
  const std::vector<std::string> mutants = {"drop-slot", "free-twice", "hit-whole-prompt",
                                            "dp-idle-skips", "sp-padding"};
  std::vector<std::string> search = {"mutants", "--save", folder};
  search.insert(search.end(), mutants.begin(), mutants.end());
  ASSERT_EQ(run_lockstep(search).status, 0);
  for (const std::string& mutant : mutants)
    for (const std::string command : {"replay", "explain", "shrink"}) {
      const std::string path = folder + "/" + mutant + ".case.jsonl";
      const Outcome again = run_lockstep({command, path});
      EXPECT_TRUE(again.status == 1 || again.status == 3) << mutant << again.out << again.err;
      EXPECT_EQ(again.out.find("NOT reproduced"), std::string::npos) << command << again.out;
      if (command != "shrink") {
        EXPECT_NE(again.out.find("The case is reproduced."), std::string::npos) << again.out;
      }
    }
  const Outcome judged =
      run_lockstep({"replay", folder + "/sp-padding.case.jsonl", "--hashes", "/dev/null"});
  EXPECT_NE(judged.out.find("Not written: --hashes. No run judges"), std::string::npos)
      << judged.out;
}

TEST(SavedFailures, AKnownFindingInTheirPlaceIsNotTheirs) {
  for (const std::string command : {"replay", "explain"}) {
    const Outcome again = run_lockstep({command, LOCKSTEP_SOURCE_DIR
                                        "/tests/regressions/"
                                        "load_ends_before_a_hit_of_hidden_states.case.jsonl"});
    EXPECT_NE(again.out.find("NOT reproduced: it fails differently"), std::string::npos)
        << command << again.out;
    EXPECT_EQ(again.status, 4) << command << again.out << again.err;
  }
}

void PrintTo(const Planted& planted, std::ostream* out) { *out << planted.name; }

INSTANTIATE_TEST_SUITE_P(Table, SavedFailures, testing::ValuesIn(kPlanted),
                         [](const auto& planted) { return planted.param.name; });

}  // namespace
}  // namespace lockstep::tests
