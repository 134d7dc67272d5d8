// `lockstep conform` from the outside: what it counts, and what a recording with one changed number
// comes to.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/cli/command.h"

namespace lockstep::tests {
namespace {

using Json = nlohmann::json;

const std::string kFamily = sample_path("recordings/vllm-0.22.1/preemption");

TEST(Conform, OfAFolderCountsItsRecordings) {
  const std::string path = temporary_path("conform.json");
  const Outcome outcome = run_lockstep({"conform", kFamily, "--json", path});
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_NE(outcome.out.find("2 of 2 recordings agree"), std::string::npos) << outcome.out;
  const Json json = Json::parse(read_text(path));
  EXPECT_EQ(json.at("files"), 2);
  EXPECT_EQ(json.at("agreed"), 2);
  EXPECT_EQ(json.at("plans"), 0);
  EXPECT_EQ(json.at("mismatches"), Json::array());
}

TEST(Conform, OfMemoryPlansCountsThem) {
  const std::string path = temporary_path("conform.json");
  const Outcome outcome = run_lockstep(
      {"conform", sample_path("recordings/vllm-0.22.1/layouts.jsonl"), "--json", path});
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  const Json json = Json::parse(read_text(path));
  EXPECT_GT(json.at("plans"), 0);
  EXPECT_EQ(json.at("agreed"), json.at("plans"));
}

TEST(Conform, OfAFolderSaysHowManyFilesItDidNotLookAt) {
  const Outcome outcome = run_lockstep({"conform", sample_path("recordings"), sample_path("")});
  EXPECT_EQ(outcome.status, 0) << outcome.err << outcome.out;
  EXPECT_NE(outcome.out.find("Not looked at: "), std::string::npos) << outcome.out;
}

TEST(Conform, TakesRecordingsWithAKVConnector) {
  const Outcome outcome =
      run_lockstep({"conform", sample_path("recordings/vllm-0.22.1/connectors")});
  EXPECT_EQ(outcome.status, 0) << outcome.err << outcome.out;
  EXPECT_NE(outcome.out.find("13 of 13 recordings agree"), std::string::npos) << outcome.out;
  EXPECT_EQ(outcome.out.find("Not looked at"), std::string::npos) << outcome.out;
}

TEST(Conform, OfARecordingWithOneChangedNumberNamesStepFieldAndBothValues) {
  std::string text = read_text(kFamily + "/0002.jsonl");
  const std::size_t at = text.rfind("\"free_blocks\":") + 14;
  const std::size_t end = text.find_first_of(",}", at);
  const int recorded = std::stoi(text.substr(at, end - at));
  text.replace(at, end - at, std::to_string(recorded - 1));
  const std::size_t line = text.rfind('\n', at) + 1;
  const int step = Json::parse(text.substr(line, text.find('\n', line) - line)).at("step");
  const std::string path = temporary_path("changed.jsonl");
  write_text(path, text);

  const std::string json_path = temporary_path("conform.json");
  const Outcome outcome = run_lockstep({"conform", path, "--json", json_path});
  EXPECT_EQ(outcome.status, 1);
  const Json json = Json::parse(read_text(json_path));
  EXPECT_EQ(json.at("agreed"), 0);
  ASSERT_EQ(json.at("mismatches").size(), 1u);
  const Json& mismatch = json.at("mismatches")[0];
  EXPECT_EQ(mismatch.at("file"), path);
  EXPECT_EQ(mismatch.at("step"), step);
  EXPECT_EQ(mismatch.at("what"), "free_blocks");
  EXPECT_EQ(mismatch.at("recorded"), recorded - 1);
  EXPECT_EQ(mismatch.at("model"), recorded);
}

}  // namespace
}  // namespace lockstep::tests
