// `lockstep check-adapter` as a command: the engines of this project pass; an adapter with one
// error fails the check of that error.
#include <gtest/gtest.h>

#include "tests/cli/command.h"

namespace lockstep::tests {
namespace {

const std::string kPaged = "python3 " LOCKSTEP_SOURCE_DIR "/docs/examples/paged_engine.py";

class SoundAdapter : public testing::TestWithParam<std::string> {};

TEST_P(SoundAdapter, PassesEveryCheck) {
  const Outcome run = run_lockstep({"check-adapter", GetParam()});
  EXPECT_EQ(run.status, 0) << run.out << run.err;
  EXPECT_EQ(run.out.find("FAILS"), std::string::npos) << run.out;
  EXPECT_NE(run.out.find("holds    the process ends with its input"), std::string::npos) << run.out;
}

INSTANTIATE_TEST_SUITE_P(All, SoundAdapter,
                         testing::Values(kPaged, LOCKSTEP_BINARY_DIR "/paged_engine",
                                         LOCKSTEP_BINARY_DIR "/model_engine"));

struct Wrong {
  std::string command;
  std::string check;  // that fails
  std::string what;
};

class WrongAdapter : public testing::TestWithParam<Wrong> {};

TEST_P(WrongAdapter, IsToldWhatItDoesWrong) {
  const Outcome run = run_lockstep({"check-adapter", GetParam().command});
  EXPECT_EQ(run.status, 1) << run.out << run.err;
  const std::size_t at = run.out.find("FAILS    " + GetParam().check);
  ASSERT_NE(at, std::string::npos) << run.out;
  EXPECT_NE(run.out.find(GetParam().what, at), std::string::npos) << run.out;
}

// Some of them are a filter before or behind a sound one.
INSTANTIATE_TEST_SUITE_P(
    All, WrongAdapter,
    testing::Values(Wrong{"(" + kPaged + "; echo bye)", "the process ends with its input",
                          "after its last reply it prints: bye"},
                    Wrong{"sed -u 's/,\"colour\":1//' | " + kPaged, "an unknown key is `failed`",
                          "expected `failed`"},
                    Wrong{"sed -u 's/\"no_such_option\":1,//' | " + kPaged,
                          "an unknown option is refused", "the case was opened"},
                    Wrong{kPaged + " | sed -u 's/\"finished\":\\[[^]]*\\],//'",
                          "the next step reports its end", "does not have request a"},
                    Wrong{kPaged + " | sed -u 's/\"full\"/\"whole\"/'", "`hello` claims features",
                          "does not have `whole`"},
                    Wrong{kPaged + " --bug lost", "cases of `full` agree", "audit.conservation"},
                    Wrong{kPaged + " --bug raise", "cases of `full` agree", "engine.exception"}));

// The engine refuses the cases of one draft method.
TEST(CheckAdapter, ChecksADraftMethodWithItsOwnCasesOnly) {
  const Outcome run = run_lockstep(
      {"check-adapter",
       "sed -u 's/\"spec_method\":\"eagle\"/\"spec_method\":\"none\"/' | " LOCKSTEP_BINARY_DIR
       "/model_engine"});
  EXPECT_EQ(run.status, 1) << run.out << run.err;
  EXPECT_NE(run.out.find("FAILS    cases of `spec:eagle` agree"), std::string::npos) << run.out;
  for (const char* method : {"ngram", "draft_model"})
    EXPECT_NE(run.out.find(std::string("holds    cases of `spec:") + method + "` agree"),
              std::string::npos)
        << run.out;
}

TEST(CheckAdapter, LeavesItsChecksAsJsonAndRefusesWhatIsNoEngine) {
  const std::string path = temporary_path("checks.json");
  const std::string junit = temporary_path("checks.xml");
  EXPECT_EQ(run_lockstep({"check-adapter", kPaged, "--json", path, "--junit", junit}).status, 0);
  EXPECT_NE(read_text(junit).find("<skipped"), std::string::npos) << read_text(junit);
  const std::string json = read_text(path);
  EXPECT_NE(json.find("\"engine\": \"paged-1.0\""), std::string::npos) << json;
  EXPECT_NE(json.find("\"verdict\": \"skipped\""), std::string::npos) << json;
  EXPECT_EQ(run_lockstep({"check-adapter", "no-such-program-here"}).status, 2);
}

}  // namespace
}  // namespace lockstep::tests
