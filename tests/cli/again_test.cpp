// Commands that `lockstep` prints repeat the failure when a shell runs them.
#include <gtest/gtest.h>

#include <filesystem>
#include <regex>

#include "tests/cli/command.h"

namespace lockstep::tests {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFinding = "/tests/regressions/vllm_0_22_1_state_hit_longer.jsonl";

// A folder whose name a shell would take apart.
std::string awkward_folder() {
  const std::string folder = fresh_path("it's $HOME; a `folder`");
  fs::create_directory(folder);
  fs::copy_file(kSample, folder + "/a trace.jsonl");
  fs::copy_file(std::string(LOCKSTEP_SOURCE_DIR) + kFinding, folder + "/a recording.jsonl");
  return folder;
}

// As a user pastes it, with `lockstep` on the path.
Outcome pasted(const std::string& line) {
  const std::string bin = temporary_path("bin");
  fs::create_directories(bin);
  if (!fs::exists(bin + "/lockstep")) fs::create_symlink(LOCKSTEP_COMMAND, bin + "/lockstep");
  return run_program("/bin/sh", {"-c", line}, {"PATH=" + bin + ":/usr/bin:/bin", "HOME=/nowhere"});
}

// What the annotations, the summary and JUnit give as the command, always the same.
std::string command_in_reports(std::vector<std::string> words, int status) {
  const std::string junit = fresh_path("again.xml");
  const std::string summary = fresh_path("again.md");
  words.insert(words.end(), {"--junit", junit, "--summary", summary, "--annotations", "github"});
  const Outcome outcome = run_lockstep(words);
  EXPECT_EQ(outcome.status, status) << outcome.err << outcome.out;
  std::smatch found;
  std::string again;
  if (std::regex_search(outcome.out, found, std::regex("%0AAgain: (.*)"))) again = found[1];
  const auto unescaped = [](std::string text) {
    for (const auto& [from, to] : {std::pair{"&apos;", "'"},
                                   {"&#39;", "'"},
                                   {"&quot;", "\""},
                                   {"&lt;", "<"},
                                   {"&gt;", ">"},
                                   {"&amp;", "&"}})
      text = std::regex_replace(text, std::regex(from), to);
    return text;
  };
  EXPECT_FALSE(again.empty()) << outcome.out;
  EXPECT_NE(unescaped(read_text(junit)).find("Again: " + again + "\n"), std::string::npos)
      << read_text(junit);
  EXPECT_NE(unescaped(read_text(summary)).find("<code>" + again + "</code>"), std::string::npos)
      << read_text(summary);
  return again;
}

std::string after(const std::string& text, const std::string& start) {
  const auto at = text.find(start);
  EXPECT_NE(at, std::string::npos) << start << text;
  const auto begin = at + start.size();
  return text.substr(begin, text.find('\n', begin) - begin);
}

// The lines of a divergence that no path or time is in.
std::string what_failed(const std::string& out) { return after(out, "\n  where  "); }

TEST(Again, OfAReplayKeepsEveryOptionOfTheRun) {
  const std::string trace = awkward_folder() + "/a trace.jsonl";
  const std::vector<std::string> words = {
      "replay",       trace, "--backend",      "simt", "--mutant",          "drop-slot",
      "--num-blocks", "60",  "--max-num-seqs", "3",    "--async-scheduling"};
  const std::string again = command_in_reports(words, 1);
  EXPECT_EQ(again.find("--junit"), std::string::npos) << again;
  const Outcome first = run_lockstep(words);
  const Outcome second = pasted(again);
  EXPECT_EQ(second.status, 1) << again << second.err;
  EXPECT_EQ(what_failed(second.out), what_failed(first.out)) << again;
}

TEST(Again, OfASavedCaseAndItsExplanation) {
  const std::string folder = awkward_folder();
  const Outcome first =
      run_lockstep({"replay", folder + "/a trace.jsonl", "--backend", "simt", "--mutant",
                    "drop-slot", "--save", folder + "/my cases", "--shrink"});
  ASSERT_EQ(first.status, 1) << first.err;
  const Outcome replayed = pasted(after(first.out, "\nReproduce: "));
  EXPECT_EQ(replayed.status, 1) << replayed.err;
  EXPECT_NE(replayed.out.find("The case is reproduced."), std::string::npos) << replayed.out;
  EXPECT_EQ(what_failed(replayed.out), what_failed(first.out));
  const Outcome explanation = pasted(after(first.out, "\nExplained: "));
  EXPECT_EQ(explanation.status, 1) << explanation.err;
  EXPECT_NE(explanation.out.find("page_written (divergence) in step 0"), std::string::npos)
      << explanation.out;
}

TEST(Again, OfAFuzzFailureRepeatsItsCase) {
  const std::string again =
      command_in_reports({"fuzz", "--backend", "simt", "--mutant", "drop-slot", "--check", "hunt",
                          "--runs", "2", "--jobs", "2"},
                         1);
  EXPECT_NE(again.find("--check hunt"), std::string::npos) << again;
  EXPECT_EQ(again.find("--runs"), std::string::npos) << again;
  const Outcome second = pasted(again);
  EXPECT_EQ(second.status, 1) << again << second.err;
  EXPECT_NE(second.out.find(again), std::string::npos) << second.out;
}

TEST(Again, OfMergedShardsHasTheOptionsOfTheShards) {
  std::vector<std::string> merge = {"fuzz", "--merge"};
  for (const std::string shard : {"0/2", "1/2"}) {
    merge.push_back(fresh_path("shard" + shard.substr(0, 1)));
    run_lockstep({"fuzz", "--mutant", "drop-slot", "--check", "fast", "--runs", "4", "--shard",
                  shard, "--json", merge.back()});
  }
  const std::string again = command_in_reports(merge, 1);
  EXPECT_NE(again.find("--check fast"), std::string::npos) << again;
  EXPECT_EQ(pasted(again).status, 1) << again;
}

TEST(Again, OfAnAuditOfManyNamesTheOneFile) {
  const std::string folder = awkward_folder();
  const std::vector<std::string> words = {"audit", folder + "/a recording.jsonl", "--min-hit-share",
                                          "0"};
  const std::string again = command_in_reports(words, 1);
  const Outcome first = run_lockstep(words);
  const Outcome second = pasted(again);
  EXPECT_EQ(second.status, 1) << again << second.err;
  EXPECT_EQ(second.out, first.out);
  // "`lockstep explain ...` shows ..."
  const std::string explain = after(first.out, "\n`lockstep explain ");
  EXPECT_EQ(pasted("lockstep explain " + explain.substr(0, explain.find("` shows"))).status, 1)
      << first.out;
}

}  // namespace
}  // namespace lockstep::tests
