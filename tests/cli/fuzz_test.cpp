// `lockstep fuzz` from the outside: one line gives one run again, and shards are the whole.
#include <gtest/gtest.h>

#include <regex>

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

TEST(Fuzz, NumbersAreDecimal) {
  const Arguments runs = {"--backend", "none", "--runs", "2", "--seed"};
  const auto with = [&](const std::string& seed) {
    Arguments all = runs;
    all.push_back(seed);
    return report_of(all, "seed" + seed + ".json");
  };
  EXPECT_EQ(with("010"), with("10"));
  EXPECT_EQ(with("08"), with("8"));
}

// /proc takes no folder, whatever the permissions of the user.
TEST(Fuzz, AnErrorOfSavingComesAfterTheReport) {
  const std::string json = temporary_path("unsaved.json");
  const Outcome found =
      run_lockstep({"fuzz", "--backend", "none", "--mutant", "hash-stale", "--runs", "60",
                    "--no-shrink", "--save", "/proc/lockstep", "--json", json});
  EXPECT_EQ(found.status, 2) << found.out;
  EXPECT_NE(found.out.find("hash-stale"), std::string::npos) << found.out;
  EXPECT_NE(found.err.find("/proc/lockstep"), std::string::npos) << found.err;
  EXPECT_NE(read_text(json).find("\"failures\":[{"), std::string::npos);
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

TEST(Fuzz, AGuidedRunWritesACorpusThatRepeatsItsFailures) {
  const std::string corpus = temporary_path("corpus.jsonl");
  const Arguments planted = {"fuzz",       "--backend", "none", "--mutant",
                             "hash-stale", "--corpus",  corpus};
  Arguments search = planted;
  search.insert(search.end(), {"--guided", "--runs", "60"});
  const Outcome found = run_lockstep(search);
  EXPECT_EQ(found.status, 1) << found.err;
  const std::string again = "lockstep fuzz --backend none --mutant hash-stale --corpus " + corpus;
  EXPECT_NE(found.out.find(again + "\n"), std::string::npos) << found.out;
  const std::string written = read_text(corpus);
  EXPECT_GT(written.size(), 1'000u);
  EXPECT_EQ(run_lockstep(planted).status, 1);
  EXPECT_EQ(read_text(corpus), written) << "a run without --guided writes no corpus";
  Arguments with_runs = planted;
  with_runs.insert(with_runs.end(), {"--runs", "5"});
  EXPECT_NE(run_lockstep(with_runs).err.find("--corpus runs its own cases; add --guided"),
            std::string::npos);
  const std::string blind = temporary_path("blind.json");
  run_lockstep({"fuzz", "--backend", "none", "--runs", "5", "--json", blind});
  const Outcome merged = run_lockstep({"fuzz", "--merge", blind, "--corpus", corpus});
  EXPECT_NE(merged.err.find("the reports are not of --guided runs"), std::string::npos);
  EXPECT_EQ(read_text(corpus), written);
  const Outcome absent = run_lockstep({"fuzz", "--corpus", corpus + ".absent"});
  EXPECT_EQ(absent.status, 2) << absent.out;
}

TEST(Fuzz, AFailureOfAGuidedRunNamesTheRunThatRepeatsIt) {
  const Outcome found = run_lockstep(
      {"fuzz", "--backend", "none", "--mutant", "hash-stale", "--guided", "--runs", "60"});
  EXPECT_EQ(found.status, 1) << found.err;
  const std::size_t at = found.out.find("--mutant hash-stale --guided --seed 1 --runs ");
  ASSERT_NE(at, std::string::npos) << found.out;
  const std::string runs = found.out.substr(at + 45, found.out.find('\n', at) - at - 45);
  const Outcome again = run_lockstep({"fuzz", "--backend", "none", "--mutant", "hash-stale",
                                      "--guided", "--seed", "1", "--runs", runs});
  EXPECT_EQ(again.status, 1);
  EXPECT_NE(again.out.find("seed " + runs + ","), std::string::npos) << again.out;
}

TEST(Fuzz, OnAGpuThereIsOneModeAndWithoutAGpuItSaysWhy) {
  const Outcome mode = run_lockstep({"fuzz", "--backend", "cuda", "--check", "hunt"});
  EXPECT_EQ(mode.status, 2);
  EXPECT_NE(mode.err.find("--check: --backend cuda has only mode fast"), std::string::npos)
      << mode.err;
  const Outcome gpu = run_lockstep({"fuzz", "--backend", "cuda", "--runs", "1"});
  EXPECT_TRUE(gpu.status == 0 || gpu.err.find("--backend cuda: no GPU: ") != std::string::npos)
      << gpu.err;
}

// A defect that fuzzing does not see would make every green run worthless.
TEST(Fuzz, ThePlantedDefectFailsAndItsCaseReplays) {
  const std::string folder = temporary_path("fuzzed-cases");
  const Outcome found =
      run_lockstep({"fuzz", "--seed", "1", "--mutant", "drop-slot", "--save", folder});
  EXPECT_EQ(found.status, 1) << found.err;
  EXPECT_NE(found.out.find("page_written"), std::string::npos) << found.out;
  EXPECT_NE(found.out.find("lockstep fuzz --mutant drop-slot --seed 1"), std::string::npos)
      << found.out;
  EXPECT_EQ(run_lockstep({"replay", folder + "/seed-1.case.jsonl"}).status, 1);
}

// A failing run leaves each case twice: as it was found, and as small as it goes.
TEST(Fuzz, SavesAFailureAndMakesItSmall) {
  const std::string folder = temporary_path("small-cases");
  const Arguments failing = {"fuzz",      "--seed", "1",      "--mutant", "drop-slot",
                             "--backend", "simt",   "--save", folder};
  const Outcome found = run_lockstep(failing);
  EXPECT_EQ(found.status, 1) << found.err;
  const std::string small = folder + "/seed-1.min.case.jsonl";
  EXPECT_NE(found.out.find("\nSaved:\n  " + folder + "/seed-1.case.jsonl  "), std::string::npos)
      << found.out;
  EXPECT_NE(found.out.find("  " + small + "  1 request, 2 tokens, 2 blocks\n"), std::string::npos)
      << found.out;
  EXPECT_EQ(run_lockstep({"replay", small}).status, 1);

  const std::string other = temporary_path("cases-as-found");
  Arguments as_found = failing;
  as_found.back() = other;
  as_found.emplace_back("--no-shrink");
  EXPECT_EQ(run_lockstep(as_found).status, 1);
  EXPECT_FALSE(read_text(other + "/seed-1.case.jsonl").empty());
  EXPECT_TRUE(read_text(other + "/seed-1.min.case.jsonl").empty());
}

TEST(Fuzz, RefusesWhatCannotBe) {
  const auto refused = [](Arguments arguments, std::string_view why) {
    arguments.insert(arguments.begin(), "fuzz");
    const Outcome outcome = run_lockstep(arguments);
    EXPECT_EQ(outcome.status, 2) << outcome.out;
    EXPECT_NE(outcome.err.find(why), std::string::npos) << outcome.err;
  };
  refused({"--shard", "3/2"}, "expected I/N");
  refused({"--shard", "0/2", "--seconds", "1"}, "use --runs");
  refused({"--engine", "no-such-engine"}, "no-such-engine");
  refused({"--seed", "1", "--mutant", "no-such-defect", "--backend", "none"},
          "--mutant: unknown mutant no-such-defect; `lockstep mutants --list` lists them");
  refused({"--merge", "no-such-file"}, "no-such-file");
  refused({"--no-shrink"}, "--save");
  refused({"--merge", "no-such-file", "--seed", "1", "--backend", "none"},
          "--merge runs nothing; omit the options of a search: --seed 1 --backend none");
  refused({"--merge", "no-such-file", "--save", "cases"}, "omit the options of a search: --save");
  refused({"--save", "cases", "--shrink-seconds", "-1"}, "--shrink-seconds");
}

// `cat monday.json tuesday.json > all.json`, and a report whose counts contradict each other.
TEST(Fuzz, MergesNoReportThatHasMoreOrLessThanItShows) {
  const std::string monday = report_of({"--backend", "none", "--runs", "3"}, "monday.json");
  const std::string tuesday =
      report_of({"--backend", "none", "--seed", "4", "--runs", "3"}, "tuesday.json");
  const auto merged = [](const std::string& text) {
    const std::string path = fresh_path("all.json");
    write_text(path, text);
    Outcome outcome = run_lockstep({"fuzz", "--merge", path});
    EXPECT_EQ(outcome.out.find("Verdict"), std::string::npos) << outcome.out;
    EXPECT_EQ(outcome.status == 2, !outcome.err.empty()) << outcome.err;
    return outcome.err;
  };
  EXPECT_NE(merged(monday + tuesday).find(":2: a second report"), std::string::npos);
  for (const auto& [from, to] :
       {std::pair{"\"cases\":3", "\"cases\":0"}, std::pair{"\"cases\":3", "\"cases\":4"},
        std::pair{"\"agreed\":3", "\"agreed\":9223372036854775807"}}) {
    std::string text = monday;
    text.replace(text.find(from), std::string_view(from).size(), to);
    EXPECT_NE(merged(text).find("do not add up to \"cases\""), std::string::npos) << merged(text);
  }
  std::string text = monday;
  text.replace(text.find("\"runs\":3"), 8, "\"runs\":5");
  EXPECT_NE(merged(text).find("shard 0/1 from seed 1 has 3 of its 5 cases"), std::string::npos)
      << merged(text);
}

TEST(Fuzz, OnATerminalSaysHowLongTheRestTakes) {
  const Outcome outcome = run_program(
      "/usr/bin/script",
      {"-qec", "timeout -s INT 3 " LOCKSTEP_COMMAND " fuzz --backend none --runs 2000000",
       "/dev/null"});
  EXPECT_TRUE(
      std::regex_search(outcome.out, std::regex(R"(of 2,000,000.*, about \d+ min \d+ s left)")))
      << outcome.out.substr(0, 2000);
}

}  // namespace
}  // namespace lockstep::tests
