// `lockstep relations` from the outside.
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "tests/cli/command.h"

namespace lockstep::tests {
namespace {

using Json = nlohmann::json;

TEST(RelationsCommand, ListsWhatEachOneSays) {
  const std::string path = temporary_path("list.json");
  const Outcome outcome = run_lockstep({"relations", "--list", "--json", path});
  EXPECT_EQ(outcome.status, 0);
  for (const char* text : {"batch mates", "shuffled blocks", "no packing", "context ranks"})
    EXPECT_NE(outcome.out.find(text), std::string::npos) << text;
  const Json listed = Json::parse(read_text(path)).at("relations");
  EXPECT_EQ(std::ssize(listed), std::ranges::count(outcome.out, '\n'));
  EXPECT_NE(outcome.out.find(listed[0].at("says").get<std::string>()), std::string::npos);
}

TEST(RelationsCommand, HoldsThemOverGeneratedCasesAndCountsWhatItCompared) {
  const std::string json_path = temporary_path("relations.json");
  const Outcome outcome = run_lockstep({"relations", "other layout", "shuffled blocks",
                                        "several streams", "--runs", "12", "--json", json_path});
  EXPECT_EQ(outcome.status, 0) << outcome.out << outcome.err;
  EXPECT_NE(outcome.out.find("0 of 3 relations broken"), std::string::npos) << outcome.out;
  const Json json = Json::parse(read_text(json_path));
  ASSERT_EQ(json.at("relations").size(), 3u);
  for (const Json& relation : json.at("relations")) {
    EXPECT_TRUE(relation.at("holds").get<bool>()) << relation;
    EXPECT_GT(relation.at("places").get<int>(), 100) << relation;
  }
  EXPECT_GT(json.at("relations")[2].at("page_steps").get<int>(), 10);
}

TEST(RelationsCommand, OneThatAppliedToNoCaseIsSaidNotToBeChecked) {
  const Outcome outcome =
      run_lockstep({"relations", "no packing", "--runs", "1", "--backend", "none"});
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_NE(outcome.out.find("\nNot checked:\n"), std::string::npos) << outcome.out;
  EXPECT_NE(outcome.out.find("  - no packing: applied to no case"), std::string::npos)
      << outcome.out;
}

TEST(RelationsCommand, OneThatComparedNothingDoesNotPass) {
  const std::string junit = temporary_path("nothing.xml");
  const Outcome run =
      run_lockstep({"relations", "other layout", "--seed", "41", "--runs", "4", "--junit", junit});
  EXPECT_EQ(run.status, 0) << run.err;
  EXPECT_NE(run.out.find("other layout: compared nothing in 4 cases"), std::string::npos)
      << run.out;
  EXPECT_NE(read_text(junit).find("skipped=\"1\""), std::string::npos);
}

TEST(RelationsCommand, WhatIsWrongIsRefused) {
  const Outcome unknown = run_lockstep({"relations", "no such thing"});
  EXPECT_EQ(unknown.status, 2);
  EXPECT_NE(unknown.err.find("unknown relation 'no such thing'"), std::string::npos);
  const Outcome engine = run_lockstep({"relations", "--engine", "vllm-9.9.9"});
  EXPECT_EQ(engine.status, 2);
  EXPECT_NE(engine.err.find("vllm-9.9.9"), std::string::npos) << engine.err;
}

}  // namespace
}  // namespace lockstep::tests
