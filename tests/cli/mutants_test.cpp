// `lockstep mutants` from the outside.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/cli/command.h"

namespace lockstep::tests {
namespace {

using Json = nlohmann::json;

TEST(Mutants, ListsWhatThereIsAndWhatEachStandsFor) {
  const Outcome outcome = run_lockstep({"mutants", "--list"});
  EXPECT_EQ(outcome.status, 0);
  for (const char* text : {"layout-two-blocks (views, vllm 37236)", "found by  ", "shows     "})
    EXPECT_NE(outcome.out.find(text), std::string::npos) << text;
  const std::string path = temporary_path("list.json");
  EXPECT_EQ(run_lockstep({"mutants", "layout-two-blocks", "--list", "--json", path}).status, 0);
  const Json listed = Json::parse(read_text(path)).at("mutants");
  ASSERT_EQ(listed.size(), 1u);
  EXPECT_EQ(listed[0].at("source"), "vllm 37236");
  EXPECT_FALSE(listed[0].at("caught_by").empty());
  const std::string page = temporary_path("page.md"), all = temporary_path("all.json");
  EXPECT_EQ(run_lockstep({"mutants", "--markdown", page, "--json", all}).status, 0);
  EXPECT_GT(Json::parse(read_text(all)).at("mutants").size(), 100u);
}

TEST(Mutants, FindsADefectAndLeavesACaseThatReplaysIt) {
  const std::string json_path = temporary_path("mutants.json");
  const std::string folder = temporary_path("mutant-cases");
  const Outcome outcome = run_lockstep(
      {"mutants", "drop-slot", "free-twice", "--jobs", "2", "--json", json_path, "--save", folder});
  EXPECT_EQ(outcome.status, 0) << outcome.out << outcome.err;
  const Json json = Json::parse(read_text(json_path));
  EXPECT_EQ(json.at("caught"), 2);
  ASSERT_EQ(json.at("mutants").size(), 2u);
  EXPECT_EQ(json.at("mutants")[0].at("id"), "drop-slot");
  EXPECT_EQ(json.at("mutants")[0].at("check"), "page_written");
  EXPECT_EQ(json.at("mutants")[0].at("smallest").at("requests"), 1);
  const Outcome replayed = run_lockstep({"replay", folder + "/drop-slot.case.jsonl"});
  EXPECT_EQ(replayed.status, 1) << replayed.out << replayed.err;
  EXPECT_NE(replayed.out.find("page_written"), std::string::npos);
}

TEST(Mutants, ASearchThatIsTooShortSaysSoAndFails) {
  const Outcome outcome = run_lockstep({"mutants", "hit-same-step", "--cases", "1"});
  EXPECT_EQ(outcome.status, 1);
  EXPECT_NE(outcome.out.find("NOT CAUGHT in 1 case"), std::string::npos) << outcome.out;
}

TEST(Mutants, AnUnknownNameIsRefused) {
  const Outcome outcome = run_lockstep({"mutants", "table-with"});
  EXPECT_EQ(outcome.status, 2);
  EXPECT_NE(outcome.err.find("unknown mutant table-with"), std::string::npos) << outcome.err;
}

}  // namespace
}  // namespace lockstep::tests
