// lockstep export, --import, and audit of a stream, as a user runs them.
#include <gtest/gtest.h>

#include <string>

#include "tests/cli/command.h"

namespace lockstep::tests {
namespace {

const std::string kTimed = sample_path("foreign/timed_trace.jsonl");

TEST(ExportCommand, WritesAFileAndSaysHowToSendIt) {
  const std::string out = temporary_path("exported.jsonl");
  const Outcome done = run_lockstep({"export", kTimed, "--as", "timed_trace", "--out", out});
  EXPECT_EQ(done.status, 0) << done.err;
  EXPECT_NE(done.out.find("3 requests as timed_trace, ids of 16 tokens\n"), std::string::npos)
      << done.out;
  EXPECT_NE(done.out.find("--dataset-name timed_trace --dataset-path " + out +
                          " --timed-trace-chunk-hash-size 16 --num-prompts 3\n"),
            std::string::npos)
      << done.out;
  EXPECT_EQ(read_text(out),
            "{\"timestamp\":0,\"input_length\":40,\"output_length\":8,\"hash_ids\":[0,1,2]}\n"
            "{\"timestamp\":0.25,\"input_length\":48,\"output_length\":4,\"hash_ids\":[0,1,3]}\n"
            "{\"timestamp\":1.5,\"input_length\":9,\"output_length\":16,\"hash_ids\":[4]}\n");
}

TEST(ExportCommand, ToStandardOutputTheRowsAloneGo) {
  const Outcome done = run_lockstep({"export", kTimed, "--as", "mooncake"});
  EXPECT_EQ(done.status, 0) << done.err;
  EXPECT_TRUE(done.out.starts_with("{\"timestamp\":0,")) << done.out;
  EXPECT_NE(done.err.find("--import block=32,time=ms."), std::string::npos) << done.err;
}

TEST(ExportCommand, SaysWhatTheImporterAssumed) {
  const Outcome done =
      run_lockstep({"export", sample_path("foreign/burstgpt.csv"), "--as", "mooncake", "--out",
                    temporary_path("burst.jsonl"), "--json", temporary_path("burst.json")});
  EXPECT_NE(done.out.find("  chosen: "), std::string::npos) << done.out << done.err;
  EXPECT_NE(read_text(temporary_path("burst.json")).find("\"chosen\": [\n"), std::string::npos);
}

TEST(ExportCommand, OfACaseItNamesTheServer) {
  const Outcome done = run_lockstep({"export",
                                     std::string(LOCKSTEP_SOURCE_DIR) +
                                         "/tests/regressions/more_memory_finishes_later.case.jsonl",
                                     "--as", "timed_trace", "--lossy"});
  EXPECT_EQ(done.status, 0) << done.err;
  EXPECT_NE(done.err.find("vllm serve MODEL --block-size 2 --num-gpu-blocks-override "),
            std::string::npos)
      << done.err;
}

TEST(ExportCommand, RefusesWithTwo) {
  const Outcome closed_loop =
      run_lockstep({"export", sample_path("foreign/weka.json"), "--as", "aiperf"});
  EXPECT_EQ(closed_loop.status, 2);
  EXPECT_NE(closed_loop.err.find("an arrival after another request ends (request "),
            std::string::npos)
      << closed_loop.err;
  EXPECT_EQ(run_lockstep({"export", kTimed, "--as", "weka"}).status, 2);
  EXPECT_EQ(run_lockstep({"export", kTimed, "--as", "mooncake", "--import", "time=h"}).status, 2);
}

TEST(ExportCommand, TheBundledSampleGoesToEveryFormatByItsName) {
  for (const std::string format : {"mooncake", "aiperf", "timed_trace"}) {
    const std::vector<std::string> words = {"export", "shared_prefixes.jsonl", "--as", format};
    const Outcome refused = run_lockstep(words);
    EXPECT_EQ(refused.status, 2);
    EXPECT_NE(refused.err.find("an abort (request r1 and "), std::string::npos) << refused.err;
    std::vector<std::string> lossy = words;
    lossy.push_back("--lossy");
    const Outcome done = run_lockstep(lossy);
    EXPECT_EQ(done.status, 0) << done.err;
    EXPECT_NE(done.err.find("left out: an arrival after another request ends ("), std::string::npos)
        << done.err;
  }
}

TEST(ReplayCommand, ReadsATraceAsImportSays) {
  const Outcome done = run_lockstep(
      {"replay", sample_path("foreign/weka.json"), "--backend", "none", "--import", "zero=skip"});
  EXPECT_EQ(done.status, 0) << done.out << done.err;
  EXPECT_NE(done.out.find("(Weka trace)"), std::string::npos) << done.out;
}

TEST(AuditCommand, TellsOfAStreamWhatItTellsOfAFile) {
  const std::string file = std::string(LOCKSTEP_SOURCE_DIR) +
                           "/tests/regressions/vllm_0_33_0_preempted_in_its_own_step.jsonl";
  const Outcome of_file = run_lockstep({"audit", file});
  const Outcome of_stream =
      run_program("/bin/sh", {"-c", std::string(LOCKSTEP_COMMAND) + " audit - < " + file});
  EXPECT_EQ(of_file.status, 1);
  EXPECT_EQ(of_stream.status, 1);
  const std::string line = of_stream.out.substr(0, of_stream.out.find('\n') + 1);
  EXPECT_TRUE(line.starts_with("audit.attention_read step 4 ")) << of_stream.out;
  EXPECT_NE(of_file.out.find(line), std::string::npos) << of_file.out;
  EXPECT_EQ(run_lockstep({"audit", "-", file}).status, 2);
}

// A finding is printed before the recording ends.
TEST(AuditCommand, TellsAFindingAsSoonAsItsStepIsIn) {
  const std::string file = std::string(LOCKSTEP_SOURCE_DIR) +
                           "/tests/regressions/vllm_0_33_0_preempted_in_its_own_step.jsonl";
  const std::string command = std::string(LOCKSTEP_COMMAND);
  const Outcome cut =
      run_program("/bin/sh", {"-c", "head -n 6 " + file + " | " + command + " audit -"});
  EXPECT_EQ(cut.status, 1);
  EXPECT_TRUE(cut.out.starts_with("audit.attention_read step 4 ")) << cut.out;
  EXPECT_NE(cut.out.find("/dev/stdin is cut off after step 4"), std::string::npos) << cut.out;
}

}  // namespace
}  // namespace lockstep::tests
