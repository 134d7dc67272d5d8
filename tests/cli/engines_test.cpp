// `lockstep engines` and `lockstep diff-engines` from the outside.
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "tests/cli/command.h"

namespace lockstep::tests {
namespace {

using Json = nlohmann::json;

TEST(Engines, ListsProfilesPoliciesAndWhatIsNotModelled) {
  const Outcome outcome = run_lockstep({"engines"});
  EXPECT_EQ(outcome.status, 0);
  for (const char* text : {"vllm-0.22.1", "vllm-0.33.0  (the default)", "freed_blocks",
                           "unhashed first", "Not modelled of vllm-0.22.1", "watermark"})
    EXPECT_NE(outcome.out.find(text), std::string::npos) << text;
}

TEST(DiffEngines, SaysWhereDecisionsPartAndWhatItCosts) {
  const std::string path = temporary_path("diff.json");
  const Outcome outcome = run_lockstep({"diff-engines", kSample, "--json", path});
  EXPECT_EQ(outcome.status, 1) << outcome.err;
  for (const char* text : {"Where they part first:", "of vllm-0.22.1:", "of vllm-0.33.0:"})
    EXPECT_NE(outcome.out.find(text), std::string::npos) << text;
  const Json json = Json::parse(read_text(path));
  // The order of freed blocks parts first; who runs does not change before what was evicted does.
  const Json& first = json.at("first_difference");
  ASSERT_TRUE(first.at("blocks").is_number());
  ASSERT_TRUE(first.at("evicted").is_number());
  EXPECT_LT(first.at("blocks"), first.at("evicted"));
  EXPECT_EQ(json.at("engines").size(), 2u);
}

TEST(DiffEngines, OfAnEngineWithItselfFindsNothing) {
  const Outcome outcome =
      run_lockstep({"diff-engines", kSample, "--engines", "vllm-0.33.0", "vllm-0.33.0"});
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_NE(outcome.out.find("the same in every step"), std::string::npos);
}

TEST(DiffEngines, TakesARecordingAndABenchmark) {
  for (const char* name :
       {"recordings/vllm-0.33.0/mamba_align", "recordings/vllm-0.22.1/benchmarks/full.jsonl"}) {
    std::string path = sample_path(name);
    if (!path.ends_with(".jsonl"))
      path = std::filesystem::directory_iterator(path)->path().string();
    const Outcome outcome = run_lockstep({"diff-engines", path});
    EXPECT_EQ(outcome.status, 1) << path << outcome.err;
  }
}

TEST(DiffEngines, RefusesUnknownEnginesAndOptionsThatMeanNothingHere) {
  const Outcome unknown =
      run_lockstep({"diff-engines", kSample, "--engines", "vllm-0.33.0", "vllm-1.0"});
  EXPECT_EQ(unknown.status, 2);
  EXPECT_NE(unknown.err.find("vllm-0.22.1, vllm-0.33.0"), std::string::npos) << unknown.err;
  const Outcome useless = run_lockstep({"diff-engines", kSample, "--engine", "vllm-0.33.0"});
  EXPECT_EQ(useless.status, 2);
  EXPECT_NE(useless.err.find("--engine"), std::string::npos) << useless.err;
}

}  // namespace
}  // namespace lockstep::tests
