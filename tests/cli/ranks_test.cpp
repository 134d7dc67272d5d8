// `lockstep replay` over ranks from the outside: degrees in, verdicts, ranks and refusals out.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/cli/command.h"

namespace lockstep::tests {
namespace {

using Json = nlohmann::json;
using Arguments = std::vector<std::string>;

Json ranks_json(Arguments arguments, int expected_status) {
  const std::string path = temporary_path("ranks.json");
  arguments.insert(arguments.begin(), {"replay", kSample, "--backend", "simt", "--limit", "20"});
  arguments.insert(arguments.end(), {"--json", path});
  const Outcome outcome = run_lockstep(arguments);
  EXPECT_EQ(outcome.status, expected_status) << outcome.err << outcome.out;
  return Json::parse(read_text(path));
}

TEST(ReplayOverRanks, AgreesForEveryKindAndNamesTheRanks) {
  const Json json =
      ranks_json({"--tensor-parallel-size", "4", "--pipeline-parallel-size", "2", "--kv-heads", "2",
                  "--queries-per-kv", "4", "--layers", "4", "--decode-context-parallel-size", "2",
                  "--cp-kv-cache-interleave-size", "4"},
                 0);
  EXPECT_EQ(json.at("verdict"), "agreed");
  EXPECT_EQ(json.at("configuration").at("ranks"), 8);
  EXPECT_EQ(json.at("configuration").at("tensor_parallel_size"), 4);
  EXPECT_EQ(json.at("configuration").at("decode_context_parallel_size"), 2);
  EXPECT_GT(json.at("union_rows_checked"), 0);
}

TEST(ReplayOverRanks, OfADefectNamesTheRankWithItsPlace) {
  const Json json = ranks_json(
      {"--tensor-parallel-size", "2", "--kv-heads", "4", "--mutant", "tp-head-offset"}, 1);
  EXPECT_EQ(json.at("divergence").at("rank"), 1);
  EXPECT_EQ(json.at("divergence").at("tp_rank"), 1);
  EXPECT_EQ(json.at("divergence").at("phase"), "page_written");
}

TEST(ReplayOverEngines, AgreesAndIdleOnesTakePart) {
  const Json json = ranks_json({"--data-parallel-size", "3"}, 0);
  EXPECT_EQ(json.at("configuration").at("data_parallel_size"), 3);
  EXPECT_EQ(json.at("requests"), 20);
  EXPECT_GT(json.at("idle_rank_steps"), 0);
  EXPECT_GT(json.at("collectives_checked"), 0);
}

TEST(ReplayOverEngines, ThatDoNotMeetEndsWithOneAndThatWaitWithThree) {
  const Json mismatch = ranks_json({"--data-parallel-size", "2", "--mutant", "dp-sync-shape"}, 1);
  EXPECT_EQ(mismatch.at("divergence").at("phase"), "collective");
  EXPECT_EQ(mismatch.at("divergence").at("dp_rank"), 1);
  const Json hang = ranks_json({"--data-parallel-size", "2", "--mutant", "dp-idle-skips"}, 3);
  EXPECT_EQ(hang.at("verdict"), "liveness");
  const Json graph =
      ranks_json({"--data-parallel-size", "2", "--graphs", "4", "--mutant", "dp-graph-alone"}, 1);
  EXPECT_EQ(graph.at("divergence").at("phase"), "collective");
}

TEST(ReplayOverEngines, ReplaysNoGraphsWhereOneOfThemHasNone) {
  const Json json = ranks_json({"--data-parallel-size", "2", "--graphs", "8"}, 0);
  EXPECT_GT(json.at("graphs").at("replayed"), 0);
  EXPECT_GT(json.at("eager_rank_steps"), 0);
}

TEST(ReplayOverEngines, MeetsFaultsInEveryEngineAndCountsThem) {
  const Json json =
      ranks_json({"--data-parallel-size", "2", "--faults", "late_output@2+4,abort_decode@3"}, 0);
  EXPECT_EQ(json.at("verdict"), "agreed");
  EXPECT_EQ(json.at("faults").size(), 2u);
  EXPECT_EQ(json.at("fault_effects").at("abort_decode"), 2);
  EXPECT_GT(json.at("fault_effects").at("late_output"), 4);
  EXPECT_EQ(json.at("stuck_dp_rank"), -1);
}

TEST(ReplayOverEngines, BesideConnectorsOfTheirOwnLoadsAndComparesInEach) {
  const Arguments beside = {"--engine",    "vllm-0.22.1", "--data-parallel-size", "2",
                            "--connector", "peers+host",  "--host-blocks",        "60"};
  const Json json = ranks_json(beside, 0);
  EXPECT_EQ(json.at("verdict"), "agreed");
  EXPECT_EQ(json.at("configuration").at("connector"), "peers+host");
  EXPECT_GT(json.at("blocks_loaded"), 0);
  EXPECT_GT(json.at("blocks_stored"), 0);
  EXPECT_GT(json.at("host_blocks_checked"), 0);
  Arguments planted = beside;
  planted.insert(planted.end(), {"--mutant", "transfer-wrong-end"});
  EXPECT_GE(ranks_json(planted, 1).at("divergence").at("dp_rank"), 0);
}

TEST(ReplayOverEngines, WritesNoFileThatTheCommandAlreadyNames) {
  const std::string input = fresh_path("t.dp0.jsonl");
  const std::string hashes = replaced(input, ".dp0", ""), text = read_text(kSample);
  write_text(input, text);
  const Outcome over_the_input = run_lockstep(
      {"replay", input, "--backend", "none", "--hashes", hashes, "--data-parallel-size", "2"});
  EXPECT_EQ(over_the_input.status, 2);
  EXPECT_NE(over_the_input.err.find("t.dp0.jsonl: data parallel rank 0 would write it"),
            std::string::npos)
      << over_the_input.err;
  EXPECT_EQ(read_text(input), text);
  const Outcome over_the_json =
      run_lockstep({"replay", kSample, "--backend", "none", "--hashes", hashes, "--json",
                    replaced(input, ".dp0", ".dp1"), "--data-parallel-size", "2"});
  EXPECT_EQ(over_the_json.status, 2) << over_the_json.out;
}

TEST(ReplayOverEngines, FromCapturedGraphsAgreesOnTheirSize) {
  const Json json = ranks_json({"--data-parallel-size", "3", "--graphs", "64"}, 0);
  EXPECT_EQ(json.at("verdict"), "agreed");
  EXPECT_GT(json.at("graphs").at("replayed"), 0);
  EXPECT_GT(json.at("idle_rank_steps"), 0);
  ranks_json({"--data-parallel-size", "3", "--graphs", "64", "--mutant", "graph-too-small"}, 1);
}

TEST(ReplayOverEngines, LeavesAReportAndCacheEventsForEach) {
  const std::string report = temporary_path("engines.html");
  const std::string events = temporary_path("engines.jsonl");
  ranks_json({"--data-parallel-size", "2", "--report", report, "--cache-events", events}, 0);
  const std::string stem = report.substr(0, report.size() - 5);
  for (const std::string rank : {"0", "1"}) {
    EXPECT_NE(read_text(stem + ".dp" + rank + ".html").find("data parallel rank " + rank + " of 2"),
              std::string::npos);
    EXPECT_NE(read_text(stem + ".dp" + rank + ".jsonl").find("\"step\":"), std::string::npos);
  }
  EXPECT_NE(read_text(stem + ".dp0.jsonl"), read_text(stem + ".dp1.jsonl"));
}

TEST(ReplayOverRanks, IsSavedWithItsDegreesAndReproduced) {
  const std::string folder = temporary_path("ranks_cases");
  const Outcome saved =
      run_lockstep({"replay", kSample, "--backend", "simt", "--limit", "20",
                    "--tensor-parallel-size", "2", "--queries-per-kv", "2", "--kv-heads", "1",
                    "--mutant", "tp-heads-not-replicated", "--save", folder});
  EXPECT_EQ(saved.status, 1) << saved.err;
  const std::string path = folder + "/shared_prefixes-step0.case.jsonl";
  EXPECT_NE(read_text(path).find("\"tensor_parallel_size\":2"), std::string::npos);
  const Outcome again = run_lockstep({"replay", path});
  EXPECT_EQ(again.status, 1) << again.err;
  EXPECT_NE(again.out.find("The case is reproduced."), std::string::npos) << again.out;
}

struct RankRefusal {
  const char* name;
  Arguments arguments;
  const char* names;
};
class RefusedRanks : public testing::TestWithParam<RankRefusal> {};

TEST_P(RefusedRanks, WithStatusTwoAndTheCulpritNamed) {
  Arguments arguments = GetParam().arguments;
  arguments.insert(arguments.begin(), {"replay", kSample});
  const Outcome outcome = run_lockstep(arguments);
  EXPECT_EQ(outcome.status, 2);
  EXPECT_NE(outcome.err.find(GetParam().names), std::string::npos) << outcome.err;
}

INSTANTIATE_TEST_SUITE_P(
    Each, RefusedRanks,
    testing::Values(
        RankRefusal{"NoRank", {"--tensor-parallel-size", "0"}, "--tensor-parallel-size"},
        RankRefusal{"HeadsThatCannotBeCut",
                    {"--backend", "simt", "--tensor-parallel-size", "3", "--kv-heads", "4"},
                    "4 KV heads"},
        RankRefusal{"QueryHeadsThatCannotBeCut",
                    {"--backend", "simt", "--tensor-parallel-size", "4", "--kv-heads", "2"},
                    "query heads"},
        RankRefusal{"MoreStagesThanLayers",
                    {"--backend", "simt", "--pipeline-parallel-size", "3"},
                    "the model has 2 layers"},
        RankRefusal{"ContextRanksThatHoldOtherHeads",
                    {"--backend", "simt", "--tensor-parallel-size", "2", "--kv-heads", "2",
                     "--decode-context-parallel-size", "2"},
                    "decode_context_parallel_size 2"},
        RankRefusal{"AnInterleaveThatDoesNotDivide",
                    {"--backend", "simt", "--decode-context-parallel-size", "2",
                     "--cp-kv-cache-interleave-size", "5"},
                    "cp_kv_cache_interleave_size 5"},
        RankRefusal{"MemoryWithoutABackend",
                    {"--backend", "none", "--tensor-parallel-size", "2"},
                    "--backend none"},
        RankRefusal{"EagerAlone", {"--backend", "none", "--enforce-eager"}, "--data-parallel-size"},
        RankRefusal{"ADefectOfEnginesInOne",
                    {"--backend", "simt", "--mutant", "dp-sync-shape"},
                    "there is one engine"},
        RankRefusal{
            "ADefectOfGraphsThatAreNone",
            {"--backend", "simt", "--data-parallel-size", "2", "--mutant", "dp-graph-alone"},
            "none are captured"},
        RankRefusal{"FaultsOfSeveralEnginesThatAreNone",
                    {"--backend", "none", "--data-parallel-size", "2", "--faults", "explode@3"},
                    "explode"},
        RankRefusal{
            "GraphsOfEnginesThatRunNone",
            {"--backend", "simt", "--data-parallel-size", "2", "--enforce-eager", "--graphs", "8"},
            "--enforce-eager"},
        RankRefusal{"HiddenStatesOfSeveralEngines",
                    {"--backend", "simt", "--data-parallel-size", "2", "--hidden-states", "."},
                    "--hidden-states"},
        RankRefusal{"AConnectorOfEnginesWithoutModelledOnes",
                    {"--backend", "none", "--data-parallel-size", "2", "--engine", "vllm-0.28.0",
                     "--connector", "host"},
                    "vllm-0.28.0"}),
    [](const auto& refusal) { return std::string(refusal.param.name); });

}  // namespace
}  // namespace lockstep::tests
