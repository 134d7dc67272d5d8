// `lockstep fuzz` from the outside: one line gives one run again, and shards are the whole.
#include <gtest/gtest.h>

#include "tests/cli/command.h"

namespace lockstep::tests {
namespace {

using Arguments = std::vector<std::string>;

std::string report_of(Arguments arguments, std::string_view name) {
  const std::string path = temporary_path(name);
  arguments.insert(arguments.begin(), "fuzz");
  arguments.insert(arguments.end(), {"--json", path});
  const Outcome outcome = run_lockstep(arguments);
  EXPECT_EQ(outcome.status, 0) << outcome.out << outcome.err;
  return read_text(path);
}

TEST(Fuzz, TheSameSeedsGiveTheSameReportByteForByte) {
  const Arguments runs = {"--seed", "5", "--runs", "12"};
  const std::string report = report_of(runs, "first.json");
  EXPECT_EQ(report_of(runs, "second.json"), report);
  EXPECT_NE(report.find("\"cases\":12"), std::string::npos) << report;
}

TEST(Fuzz, ShardsMergeIntoTheWhole) {
  const Arguments runs = {"--backend", "none", "--runs", "100"};
  const std::string whole = report_of(runs, "whole.json");
  Arguments merge = {"--merge"};
  for (const std::string shard : {"1/2", "0/2"}) {
    Arguments part = runs;
    part.insert(part.end(), {"--shard", shard});
    const std::string name = "shard" + shard.substr(0, 1) + ".json";
    report_of(part, name);
    merge.push_back(temporary_path("") + name);
  }
  EXPECT_EQ(report_of(merge, "merged.json"), whole);
}

// A defect that fuzzing does not see would make every green run worthless.
TEST(Fuzz, ThePlantedDefectFailsAndItsCaseReplays) {
  const std::string folder = temporary_path("fuzzed-cases");
  const Outcome found =
      run_lockstep({"fuzz", "--seed", "1", "--mutant", "drop-slot", "--save", folder});
  EXPECT_EQ(found.status, 1) << found.err;
  EXPECT_NE(found.out.find("page_written"), std::string::npos) << found.out;
  EXPECT_NE(found.out.find("lockstep fuzz --seed 1 --backend simt --mutant drop-slot"),
            std::string::npos)
      << found.out;
  EXPECT_EQ(run_lockstep({"replay", folder + "/seed-1.case.jsonl"}).status, 1);
}

TEST(Fuzz, RefusesWhatCannotBe) {
  const auto refused = [](Arguments arguments, std::string_view why) {
    arguments.insert(arguments.begin(), "fuzz");
    const Outcome outcome = run_lockstep(arguments);
    EXPECT_EQ(outcome.status, 2) << outcome.out;
    EXPECT_NE(outcome.err.find(why), std::string::npos) << outcome.err;
  };
  refused({"--shard", "3/2"}, "expected I/N");
  refused({"--shard", "0/2", "--seconds", "1"}, "give --runs");
  refused({"--engine", "no-such-engine"}, "no-such-engine");
  refused({"--seed", "1", "--mutant", "no-such-defect"}, "no-such-defect");
  refused({"--merge", "no-such-file"}, "no-such-file");
}

}  // namespace
}  // namespace lockstep::tests
