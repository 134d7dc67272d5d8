// `lockstep shrink`, `lockstep explain` and `replay --shrink` from the outside.
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "tests/cli/command.h"

namespace lockstep::tests {
namespace {

using Json = nlohmann::json;

const std::string kFinding =
    LOCKSTEP_SOURCE_DIR "/tests/regressions/vllm_0_22_1_state_hit_longer.jsonl";

// The divergence of a mutant as a saved case.
std::string saved_divergence(const std::string& mutant) {
  const std::string folder = fresh_path("cases");
  const Outcome found =
      run_lockstep({"replay", kSample, "--backend", "simt", "--mutant", mutant, "--save", folder});
  EXPECT_EQ(found.status, 1) << found.err << found.out;
  return std::filesystem::directory_iterator(folder)->path().string();
}

TEST(Shrink, OfADivergenceLeavesOneRequestAndOneLayerThatReplayTheSame) {
  const std::string saved = saved_divergence("drop-slot");
  const std::string smallest = temporary_path("small.case.jsonl");
  const std::string json_path = temporary_path("shrink.json");
  const Outcome outcome = run_lockstep({"shrink", saved, "-o", smallest, "--json", json_path});
  ASSERT_EQ(outcome.status, 1) << outcome.err << outcome.out;
  const Json json = Json::parse(read_text(json_path));
  EXPECT_EQ(json.at("check"), "page_written");
  EXPECT_TRUE(json.at("minimal"));
  EXPECT_EQ(json.at("before").at("requests"), 4);
  EXPECT_EQ(json.at("after").at("requests"), 1);
  EXPECT_EQ(json.at("after").at("layers"), 1);
  EXPECT_EQ(json.at("after").at("blocks"), 2);
  EXPECT_LE(json.at("after").at("tokens").get<int>(), 3);
  const Outcome again = run_lockstep({"replay", smallest});
  EXPECT_EQ(again.status, 1) << again.err;
  EXPECT_NE(again.out.find("The case is reproduced."), std::string::npos) << again.out;
}

TEST(Shrink, TwiceWritesTheSameBytesAndTheSmallestShrinksNoFurther) {
  const std::string saved = saved_divergence("wrong-stride");
  const std::string first = temporary_path("first.case.jsonl");
  const std::string second = temporary_path("second.case.jsonl");
  const std::string third = temporary_path("third.case.jsonl");
  ASSERT_EQ(run_lockstep({"shrink", saved, "-o", first}).status, 1);
  ASSERT_EQ(run_lockstep({"shrink", saved, "-o", second}).status, 1);
  EXPECT_EQ(read_text(first), read_text(second));
  ASSERT_EQ(run_lockstep({"shrink", first, "-o", third}).status, 1);
  EXPECT_EQ(read_text(first), read_text(third));
}

TEST(Shrink, OfARecordingKeepsTheFindingOfTheAudit) {
  const std::string smallest = temporary_path("small.case.jsonl");
  const Outcome outcome = run_lockstep({"shrink", kFinding, "-o", smallest});
  ASSERT_EQ(outcome.status, 1) << outcome.err << outcome.out;
  EXPECT_NE(outcome.out.find("It still fails: audit.attention_read (violation)"), std::string::npos)
      << outcome.out;
  const Outcome explanation = run_lockstep({"explain", smallest});
  EXPECT_EQ(explanation.status, 1) << explanation.err;
  EXPECT_NE(explanation.out.find("Here it fails: audit.attention_read"), std::string::npos)
      << explanation.out;
}

TEST(Shrink, OfWhatDoesNotFailWritesNothing) {
  const std::string smallest = temporary_path("nothing.case.jsonl");
  const Outcome outcome = run_lockstep(
      {"shrink", LOCKSTEP_SOURCE_DIR "/tests/regressions/vllm_0_33_0_window_freed_by_drafts.jsonl",
       "-o", smallest});
  EXPECT_EQ(outcome.status, 0) << outcome.err << outcome.out;
  EXPECT_FALSE(std::filesystem::exists(smallest));
}

TEST(Shrink, RefusesATraceAndSaysHowACaseIsMade) {
  const Outcome outcome = run_lockstep({"shrink", kSample});
  EXPECT_EQ(outcome.status, 2);
  EXPECT_NE(outcome.err.find("--save"), std::string::npos) << outcome.err;
}

TEST(Shrink, OfAReplayWritesTheSmallestBesideTheSavedCase) {
  const std::string folder = temporary_path("shrunk_cases");
  const Outcome found = run_lockstep({"replay", kSample, "--backend", "simt", "--mutant",
                                      "drop-slot", "--save", folder, "--shrink"});
  ASSERT_EQ(found.status, 1) << found.err << found.out;
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  ASSERT_EQ(names.size(), 2u) << found.out;
  EXPECT_EQ(names[1], "shared_prefixes-step0.min.case.jsonl");
  EXPECT_EQ(run_lockstep({"replay", kSample, "--shrink"}).status, 2);
}

TEST(Explain, OfADivergenceDrawsTheTableThePoolAndThePage) {
  const std::string saved = saved_divergence("drop-slot");
  const std::string smallest = temporary_path("small.case.jsonl");
  ASSERT_EQ(run_lockstep({"shrink", saved, "-o", smallest}).status, 1);
  const std::string json_path = temporary_path("explanation.json");
  const Outcome outcome = run_lockstep({"explain", smallest, "--json", json_path});
  EXPECT_EQ(outcome.status, 1) << outcome.err;
  for (const char* part : {"r0 arrives", "r0 is scheduled: token 0", "group 0  r0  [1*: 0]",
                           "pool     1: r0", "the rule", "WRONG from byte", "writer"})
    EXPECT_NE(outcome.out.find(part), std::string::npos) << part << "\n" << outcome.out;
  const Json json = Json::parse(read_text(json_path));
  EXPECT_EQ(json.at("divergence").at("phase"), "page_written");
}

}  // namespace
}  // namespace lockstep::tests
