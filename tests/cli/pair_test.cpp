// `lockstep pair` from the outside: what it prints and writes, its exit statuses, and the mutants
// that it takes.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/cli/command.h"

namespace lockstep::tests {
namespace {

std::vector<std::string> lossy(std::vector<std::string> more) {
  std::vector<std::string> arguments = {"pair",        kSample, "--seed",   "4", "--loss",     "10",
                                        "--duplicate", "10",    "--damage", "5", "--straggle", "10",
                                        "--slow",      "10",    "--dead",   "5"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

TEST(Pair, BringsEveryRequestThroughALossyNetworkAndWritesDownWhatHappened) {
  const std::string path = temporary_path("pair.json");
  const Outcome outcome = run_lockstep(lossy({"--json", path}));
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_NE(outcome.out.find("Verdict: kept."), std::string::npos) << outcome.out;
  const auto json = nlohmann::json::parse(read_text(path));
  EXPECT_EQ(json.at("verdict"), "kept");
  EXPECT_EQ(json.at("requests"), 320);
  EXPECT_EQ(json.at("finished_requests").get<int>() + json.at("aborted_requests").get<int>(), 320);
  EXPECT_GT(json.at("network").at("lost").get<int>(), 50);
  EXPECT_GT(json.at("transfers").at("reads_again").get<int>(), 50);
  EXPECT_GT(json.at("blocks_checked").get<int>(), 500);
  EXPECT_EQ(json.at("configuration").at("loss_percent"), 10);
  EXPECT_EQ(json.at("decode").at("verdict"), "agreed");
}

TEST(Pair, EndsWithStatusOneAndTheBrokenRuleWhenADefectIsPlanted) {
  for (const auto& [mutant, check] : {std::pair{"send-freed-early", "transfer.freed_early"},
                                      std::pair{"delivery-twice", "transfer.delivered_twice"},
                                      std::pair{"recv-failed-marked-ok", "transfer.incomplete"}}) {
    const Outcome outcome = run_lockstep(lossy({"--mutant", mutant, "--retries", "2"}));
    EXPECT_EQ(outcome.status, 1) << mutant << outcome.err;
    EXPECT_NE(outcome.out.find(check), std::string::npos) << outcome.out;
  }
}

TEST(Pair, WithABackendRealPagesCrossTheNetworkAndEveryOneIsCompared) {
  const std::string path = temporary_path("pair_pages.json");
  const Outcome outcome =
      run_lockstep(lossy({"--backend", "simt", "--layers", "2", "--kv-heads", "1", "--head-size",
                          "16", "--limit", "30", "--json", path}));
  EXPECT_EQ(outcome.status, 0) << outcome.out << outcome.err;
  const auto json = nlohmann::json::parse(read_text(path));
  EXPECT_EQ(json.at("verdict"), "kept");
  EXPECT_NE(json.at("configuration").at("backend").get<std::string>().find("simt"),
            std::string::npos);
  EXPECT_GT(json.at("decode").at("blocks_loaded").get<int>(), 100);
  EXPECT_GT(json.at("decode").at("pages_checked").get<int>(), 1'000);
  EXPECT_EQ(outcome.out.find("content ids instead of bytes"), std::string::npos) << outcome.out;
}

TEST(Pair, OfTensorParallelRanksSendsWhatEachOfThemHolds) {
  const std::string path = temporary_path("pair_ranks.json");
  const Outcome outcome = run_lockstep(lossy(
      {"--backend", "simt", "--layers", "2", "--kv-heads", "2", "--head-size", "16",
       "--tensor-parallel-size", "2", "--queries-per-kv", "2", "--limit", "10", "--json", path}));
  EXPECT_EQ(outcome.status, 0) << outcome.out << outcome.err;
  const auto json = nlohmann::json::parse(read_text(path));
  EXPECT_EQ(json.at("verdict"), "kept");
  EXPECT_EQ(json.at("configuration").at("tensor_parallel_size"), 2);
  EXPECT_NE(outcome.out.find("2 ranks in each engine"), std::string::npos) << outcome.out;
}

TEST(Pair, WithoutABackendSaysThatNoByteOfAPageWasChecked) {
  const Outcome outcome = run_lockstep(lossy({"--steps", "50"}));
  EXPECT_NE(outcome.out.find("Not checked:\n  - the bytes of pages"), std::string::npos)
      << outcome.out;
}

TEST(Pair, WithABackendTakesItsDefectsToo) {
  const Outcome outcome =
      run_lockstep({"pair", kSample, "--backend", "simt", "--layers", "1", "--kv-heads", "1",
                    "--head-size", "16", "--limit", "10", "--mutant", "load-before-arrival"});
  EXPECT_EQ(outcome.status, 1) << outcome.out << outcome.err;
  EXPECT_NE(outcome.out.find("memory.divergence"), std::string::npos) << outcome.out;
  const Outcome backend = run_lockstep({"pair", kSample, "--backend", "simt", "--layers", "2",
                                        "--kv-heads", "1", "--head-size", "16", "--limit", "30",
                                        "--mutant", "copy-unordered", "--streams", "2"});
  EXPECT_EQ(backend.status, 1) << backend.out << backend.err;
}

TEST(Pair, IsCutShortWhereTheUserSaysSo) {
  const Outcome outcome = run_lockstep(lossy({"--steps", "100"}));
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_NE(outcome.out.find("cut short by --steps"), std::string::npos) << outcome.out;
}

TEST(Pair, WaitsForEverWithStatusThreeAndNamesWho) {
  const Outcome outcome = run_lockstep({"pair", kSample, "--num-blocks", "33", "--offer", "50",
                                        "--delay-ns", "1000000000", "--prefill-blocks", "400"});
  EXPECT_EQ(outcome.status, 3) << outcome.out << outcome.err;
  EXPECT_NE(outcome.out.find("Cycle: "), std::string::npos) << outcome.out;
}

}  // namespace
}  // namespace lockstep::tests
