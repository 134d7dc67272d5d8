// `--backend worker:COMMAND` and `lockstep worker` from the outside, with a worker of two hundred
// lines (tests/engines/model_worker.py): what it does wrong is found by the right check.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "tests/cli/command.h"

namespace lockstep::tests {
namespace {

const std::string kWorker = "worker:python3 " LOCKSTEP_SOURCE_DIR "/tests/engines/model_worker.py";
const std::string kRecordings = sample_path("recordings/vllm-0.22.1");

std::string recording(const std::string& name) { return kRecordings + "/" + name + ".jsonl"; }

Outcome replay(const std::string& file, const std::string& defect = "") {
  const std::string worker = defect.empty() ? kWorker : kWorker + " --defect " + defect;
  return run_lockstep({"replay", file, "--backend", worker});
}

TEST(Worker, ThatIsSoundAgreesThoughItOrdersItsBatchOtherwise) {
  for (const char* name :
       {"full_attention/0001", "preemption/0002", "full_and_sliding_window/0005"}) {
    const Outcome found = replay(recording(name));
    EXPECT_EQ(found.status, 0) << name << found.out << found.err;
    EXPECT_NE(found.out.find("Verdict: agreed"), std::string::npos) << found.out;
    EXPECT_NE(found.out.find("attention, compiled kernels"), std::string::npos) << found.out;
  }
}

TEST(Worker, OfMlaOfStatesAndOfHiddenStatesAgrees) {
  for (const char* name : {"mla/0011", "mamba_none/0008", "mamba_align/0005", "mamba_only/0023",
                           "hidden_state_group/0019"}) {
    const Outcome found = replay(recording(name));
    EXPECT_EQ(found.status, 0) << name << found.out << found.err;
  }
}

TEST(Worker, ThatIsWrongAboutStatesIsFound) {
  const std::pair<const char*, const char*> kDefects[] = {
      {"column", ", page_written"}, {"state view", "view of layers.1: state 0 lies at byte 8"}};
  for (const auto& [defect, check] : kDefects) {
    const Outcome found = replay(recording("mamba_align/0005"), fmt::format("'{}'", defect));
    EXPECT_EQ(found.status, 1) << defect << found.out << found.err;
    EXPECT_NE(found.out.find(check), std::string::npos) << defect << found.out;
  }
}

TEST(Worker, ThatIsWrongIsFoundByTheCheckOfWhatItDoes) {
  const std::pair<const char*, const char*> kDefects[] = {
      {"slot", ", slot_mapping"},     {"table", ", block_table"},
      {"write", ", page_written"},    {"stray", "page_"},
      {"position", ", memory_check"}, {"raise", "the worker raises in step 2"},
      {"crash", "exit status 3"},     {"view", "view of layers.0"},
  };
  for (const auto& [defect, check] : kDefects) {
    const Outcome found = replay(recording("full_attention/0001"), defect);
    EXPECT_EQ(found.status, 1) << defect << found.out << found.err;
    EXPECT_NE(found.out.find(check), std::string::npos) << defect << found.out;
  }
}

TEST(Worker, RefusesByName) {
  const Outcome drafts = replay(recording("spec_decode_mamba/0000"));
  EXPECT_EQ(drafts.status, 2) << drafts.out;
  EXPECT_NE(drafts.err.find("states of drafts"), std::string::npos) << drafts.err;
  const Outcome checked = run_lockstep(
      {"replay", recording("full_attention/0001"), "--backend", kWorker, "--check", "hunt"});
  EXPECT_EQ(checked.status, 2);
  EXPECT_NE(checked.err.find("kernels of this project"), std::string::npos) << checked.err;
  const Outcome none =
      run_lockstep({"replay", recording("full_attention/0001"), "--backend", "worker:false"});
  EXPECT_EQ(none.status, 2);
  EXPECT_NE(none.err.find("--backend `false`"), std::string::npos) << none.err;
}

TEST(Worker, OfManyFilesIsATableOfFolders) {
  const std::string json = temporary_path("worker.json");
  const Outcome found =
      run_lockstep({"worker", kWorker, kRecordings + "/full_attention",
                    kRecordings + "/full_and_chunked_local", "--files", "2", "--json", json});
  EXPECT_EQ(found.status, 0) << found.out << found.err;
  EXPECT_NE(found.out.find("layers of kind chunked_local"), std::string::npos) << found.out;
  EXPECT_NE(read_text(json).find("\"family\": \"full_attention\""), std::string::npos);
  const Outcome wrong = run_lockstep(
      {"worker", kWorker + " --defect slot", kRecordings + "/full_attention", "--files", "1"});
  EXPECT_EQ(wrong.status, 1) << wrong.out;
}

}  // namespace
}  // namespace lockstep::tests
