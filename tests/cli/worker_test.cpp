// `--backend worker:COMMAND` and `lockstep worker` from the outside, with a worker of two hundred
// lines (tests/engines/model_worker.py): what it does wrong is found by the right check.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

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
      {"column", ", page_written"}, {"state view", "view of layers.1: state 0 is at byte 8"}};
  for (const auto& [defect, check] : kDefects) {
    const Outcome found = replay(recording("mamba_align/0005"), fmt::format("'{}'", defect));
    EXPECT_EQ(found.status, 1) << defect << found.out << found.err;
    EXPECT_NE(found.out.find(check), std::string::npos) << defect << found.out;
  }
}

TEST(Worker, ThatSavesHiddenStatesWronglyIsFound) {
  const std::pair<const char*, const char*> kDefects[] = {
      {"extraction", "the extracted row differs"}, {"connector", "the connector raises"}};
  for (const auto& [defect, what] : kDefects) {
    const Outcome found = replay(recording("hidden_state_group/0019"), defect);
    EXPECT_EQ(found.status, 1) << defect << found.out << found.err;
    EXPECT_NE(found.out.find(", extraction\n"), std::string::npos) << defect << found.out;
    EXPECT_NE(found.out.find(what), std::string::npos) << defect << found.out;
  }
}

TEST(Worker, ThatIsWrongIsFoundByTheCheckOfWhatItDoes) {
  const std::pair<const char*, const char*> kDefects[] = {
      {"slot", ", slot_mapping"},
      {"table", ", block_table"},
      {"write", ", page_written"},
      {"stray", "page_"},
      {"position", ", memory_check"},
      {"raise", "the worker raises in step 2"},
      {"crash", "exit status 3"},
      {"view", "view of layers.0"},
      {"plan", "cannot determine a layout for this plan"},
  };
  for (const auto& [defect, check] : kDefects) {
    const Outcome found = replay(recording("full_attention/0001"), defect);
    EXPECT_EQ(found.status, 1) << defect << found.out << found.err;
    EXPECT_NE(found.out.find(check), std::string::npos) << defect << found.out;
  }
}

TEST(Worker, IsNotAccusedOfWhatLockstepRaisesInItsProcess) {
  const std::string folder = temporary_path("harness-cases");
  const Outcome found = run_lockstep({"replay", recording("full_attention/0001"), "--backend",
                                      kWorker + " --defect harness", "--save", folder});
  EXPECT_EQ(found.status, 2) << found.out << found.err;
  EXPECT_NE(found.out.find("LOCKSTEP FAILED; the engine was not checked.\n"
                           "  the host of the worker raises in step 2\nin model_worker.py"),
            std::string::npos)
      << found.out;
  EXPECT_NE(found.out.find("Saved: " + folder), std::string::npos) << found.out;
  const std::string cases = temporary_path("harness-fuzz");
  const Outcome fuzzed =
      run_lockstep({"fuzz", "--backend", kWorker + " --defect harness", "--engine", "vllm-0.22.1",
                    "--seed", "1", "--runs", "2", "--save", cases, "--no-shrink"});
  EXPECT_EQ(fuzzed.status, 2) << fuzzed.out << fuzzed.err;
  EXPECT_NE(fuzzed.out.find("2 cases, harness: seed 1, harness\n"
                            "  the host of the worker raises in step 2\nin model_worker.py"),
            std::string::npos)
      << fuzzed.out;
  EXPECT_NE(fuzzed.out.find("/seed-1.case.jsonl"), std::string::npos) << fuzzed.out;
}

// vLLM 0.33.0 copies whole blocks of states in padded pages.
TEST(Worker, MayLeaveTheSourcesPaddingInACopiedBlock) {
  const std::string file =
      LOCKSTEP_SOURCE_DIR "/tests/regressions/copied_block_has_its_sources_padding.case.jsonl";
  const Outcome found = replay(file);
  EXPECT_EQ(found.status, 0) << found.out << found.err;
  EXPECT_NE(found.out.find("where they are the source's"), std::string::npos) << found.out;
  const Outcome other = replay(file, "padding");
  EXPECT_EQ(other.status, 1) << other.out << other.err;
  EXPECT_NE(other.out.find("padding or unused space of block 3"), std::string::npos) << other.out;
}

// Seed 1240014 of vLLM 0.22.1: step 2 allocates block 3 to r0, preempts r0, and still zeroes the
// block. Blocks 11 and 12 are r1's.
TEST(Worker, MayZeroABlockOfARequestThatTheStepPreemptsAndNoneInUse) {
  const std::string file =
      LOCKSTEP_SOURCE_DIR "/tests/regressions/vllm_0_22_1_zeroed_block_of_a_victim.jsonl";
  const Outcome found = replay(file);
  EXPECT_EQ(found.status, 0) << found.out << found.err;
  EXPECT_NE(found.out.find("zeroing of 1 blocks"), std::string::npos) << found.out;
  const std::pair<const char*, const char*> kInUse[] = {
      {"11",
       "reads token 0 from slot 0 of block 11, which holds nothing that was written since step 2 "
       "zeroed the block"},
      {"12", "the state after 1 tokens is read from block 14, which holds none"}};
  for (const auto& [block, what] : kInUse) {
    std::string text = read_text(file);
    text.replace(text.find("\"zero\":[14,3"), 12, fmt::format("\"zero\":[14,{}", block));
    const std::string path = temporary_path("zeroed-in-use.jsonl");
    std::ofstream(path) << text;
    for (const std::string& backend : {kWorker, std::string("simt")}) {
      const Outcome wrong = run_lockstep({"replay", path, "--backend", backend});
      EXPECT_EQ(wrong.status, 1) << wrong.out << wrong.err;
      EXPECT_NE(wrong.out.find(what), std::string::npos) << wrong.out;
    }
  }
}

TEST(Worker, LeavesCasesThatTheKernelsOfThisProjectRun) {
  for (const char* name :
       {"copied_block_has_its_sources_padding", "state_column_of_attention_blocks"}) {
    const std::string file =
        fmt::format(LOCKSTEP_SOURCE_DIR "/tests/regressions/{}.case.jsonl", name);
    const Outcome found = run_lockstep({"replay", file, "--backend", "simt"});
    EXPECT_EQ(found.status, 0) << name << found.out << found.err;
  }
}

TEST(Worker, RefusesByName) {
  const Outcome drafts = replay(recording("spec_decode_mamba/0000"));
  EXPECT_EQ(drafts.status, 2) << drafts.out;
  EXPECT_NE(drafts.err.find("states of drafts"), std::string::npos) << drafts.err;
  const Outcome checked = run_lockstep(
      {"replay", recording("full_attention/0001"), "--backend", kWorker, "--check", "hunt"});
  EXPECT_EQ(checked.status, 2);
  EXPECT_NE(checked.err.find("need Lockstep's own kernels"), std::string::npos) << checked.err;
  const Outcome none =
      run_lockstep({"replay", recording("full_attention/0001"), "--backend", "worker:false"});
  EXPECT_EQ(none.status, 2);
  EXPECT_NE(none.err.find("--backend `false`"), std::string::npos) << none.err;
}

TEST(Worker, OfManyFilesIsATableOfFolders) {
  const std::string json = temporary_path("worker.json");
  const std::string facts = temporary_path("worker-facts");
  std::filesystem::create_directories(facts);
  const Outcome found = run_lockstep({"worker", kWorker, kRecordings + "/full_attention",
                                      kRecordings + "/full_and_chunked_local", "--files", "2",
                                      "--json", json, "--save-facts", facts});
  EXPECT_EQ(found.status, 2) << found.out << found.err;  // the worker refuses chunks
  EXPECT_NE(found.err.find("2 of 4 files refused"), std::string::npos) << found.err;
  EXPECT_EQ(run_lockstep({"audit", facts + "/full_attention-0001.jsonl"}).status, 0);
  EXPECT_NE(found.out.find("layers of kind chunked_local"), std::string::npos) << found.out;
  EXPECT_NE(read_text(json).find("\"family\": \"full_attention\""), std::string::npos);
  const Outcome wrong = run_lockstep(
      {"worker", kWorker + " --defect slot", kRecordings + "/full_attention", "--files", "1"});
  EXPECT_EQ(wrong.status, 1) << wrong.out;
}

// The worker executes the recorded decisions, so those of the model do not matter.
TEST(Worker, AgreesWithARecordingThatTheModelDoesNotDecideAlike) {
  std::string text = read_text(recording("full_attention/0001"));
  const std::string free = R"("waiting":[],"free_blocks":)";
  const std::size_t at = text.find(free) + free.size();
  ASSERT_EQ(text.substr(at, 1), "7");
  text[at] = '6';
  const std::string path = temporary_path("other-model.jsonl");
  write_text(path, text);
  EXPECT_EQ(run_lockstep({"conform", path}).status, 1);
  const std::string json = temporary_path("other-model.json");
  const Outcome found = run_lockstep({"worker", kWorker, path, "--json", json});
  EXPECT_EQ(found.status, 0) << found.out << found.err;
  EXPECT_NE(read_text(json).find("\"agreed\": 1"), std::string::npos) << read_text(json);
  EXPECT_NE(read_text(json).find("\"parted\": 0"), std::string::npos) << read_text(json);
}

TEST(Worker, IsFuzzedAndNamedInReports) {
  const std::string json = temporary_path("worker-fuzz.json");
  const Outcome found = run_lockstep(
      {"fuzz", "--backend", kWorker, "--engine", "vllm-0.22.1", "--runs", "25", "--json", json});
  EXPECT_EQ(found.status, 0) << found.out << found.err;
  EXPECT_NE(found.out.find("24 agreed, 0 refused, 1 of known findings"), std::string::npos)
      << found.out;
  EXPECT_NE(read_text(json).find(R"("worked_by":"model-0.22.1, runner only")"), std::string::npos)
      << read_text(json);
  const Outcome mutant = run_lockstep({"fuzz", "--backend", kWorker, "--mutant", "drop-slot"});
  EXPECT_EQ(mutant.status, 2);
  EXPECT_NE(mutant.err.find("with --plant"), std::string::npos) << mutant.err;
}

TEST(Worker, ThatFailsIsShrunkWithTheWorkerInTheLoopAndItsCaseNamesIt) {
  const std::string folder = temporary_path("worker-cases");
  const std::string wrong = kWorker + " --defect slot";
  const Outcome found =
      run_lockstep({"fuzz", "--backend", wrong, "--engine", "vllm-0.22.1", "--seed", "1", "--runs",
                    "4", "--save", folder, "--shrink-seconds", "20"});
  EXPECT_EQ(found.status, 1) << found.out << found.err;
  EXPECT_NE(found.out.find("slot_mapping"), std::string::npos) << found.out;
  std::size_t begin = found.out.find(".min.case.jsonl");
  ASSERT_NE(begin, std::string::npos) << found.out;
  begin = found.out.rfind("  ", begin) + 2;
  const std::string smallest = found.out.substr(begin, found.out.find(".jsonl", begin) + 6 - begin);
  const std::string text = read_text(smallest);
  EXPECT_NE(text.find(R"("worked_by":{"engine":{"name":"model","version":"0.22.1"},)"
                      R"("runner":"only"})"),
            std::string::npos)
      << text;
  const Outcome again = run_lockstep({"replay", smallest});
  EXPECT_EQ(again.status, 1) << again.out << again.err;
  EXPECT_NE(again.out.find("The case is reproduced."), std::string::npos) << again.out;
  EXPECT_EQ(again.out.find("when this case failed"), std::string::npos) << again.out;
  const Outcome other = run_lockstep({"replay", smallest, "--backend", "none"});
  EXPECT_NE(other.out.find("The worker of model-0.22.1, runner only held the cache when this case "
                           "failed; here --backend none does."),
            std::string::npos)
      << other.out << other.err;
  EXPECT_EQ(run_lockstep({"replay", smallest, "--backend", "simt"}).status, 4);
  EXPECT_EQ(run_lockstep({"explain", smallest}).status, 1);
  const std::string recording =
      smallest.substr(0, smallest.size() - std::string("case.jsonl").size()) + "recording.jsonl";
  const Outcome audited = run_lockstep({"audit", recording});
  EXPECT_EQ(audited.status, 1) << audited.out << audited.err;
  EXPECT_NE(audited.out.find("audit.worker_slot"), std::string::npos) << audited.out;
}

TEST(Worker, LeavesFactsThatAreAuditedWithoutIt) {
  const std::string path = temporary_path("facts.jsonl");
  for (const char* name :
       {"full_attention/0001", "preemption/0002", "full_and_sliding_window/0005"}) {
    const Outcome found =
        run_lockstep({"replay", recording(name), "--backend", kWorker, "--save-facts", path});
    EXPECT_EQ(found.status, 0) << name << found.out << found.err;
    EXPECT_NE(read_text(path).find("\"facts\":{\"rows\":"), std::string::npos) << name;
    const Outcome audited = run_lockstep({"audit", path});
    EXPECT_EQ(audited.status, 0) << name << audited.out << audited.err;
    EXPECT_EQ(run_lockstep({"conform", path}).status, 0) << name;
  }
  const std::pair<const char*, const char*> kDefects[] = {{"slot", "audit.worker_slot step"},
                                                          {"table", "audit.worker_table step"},
                                                          {"write", "audit.worker_page step"},
                                                          {"stray", "audit.worker_page step 3"},
                                                          {"position", "audit.worker_batch step"}};
  for (const auto& [defect, rule] : kDefects) {
    const Outcome found = run_lockstep({"replay", recording("full_attention/0001"), "--backend",
                                        kWorker + " --defect " + defect, "--save-facts", path});
    EXPECT_EQ(found.status, 1) << defect << found.out << found.err;
    const Outcome audited = run_lockstep({"audit", path});
    EXPECT_EQ(audited.status, 1) << defect << audited.out << audited.err;
    EXPECT_NE(audited.out.find(rule), std::string::npos) << defect << audited.out;
  }
  const Outcome trace =
      run_lockstep({"replay", sample_path("shared_prefixes.jsonl"), "--save-facts", path});
  EXPECT_EQ(trace.status, 2);
  EXPECT_NE(trace.err.find("facts are written into a recording"), std::string::npos) << trace.err;
  const Outcome simt = run_lockstep(
      {"replay", recording("full_attention/0001"), "--backend", "simt", "--save-facts", path});
  EXPECT_EQ(simt.status, 2);
  EXPECT_NE(simt.err.find("is not an engine's worker"), std::string::npos) << simt.err;
}

}  // namespace
}  // namespace lockstep::tests
