// `--decisions` as a command, with an engine of a hundred lines: fuzzing finds its defects, shrinks
// them and saves them as recordings; a known finding is reported as new after its last day.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "tests/cli/command.h"

namespace lockstep::tests {
namespace {

const std::string kEngine = "python3 " LOCKSTEP_SOURCE_DIR "/docs/examples/paged_engine.py";

Outcome fuzz(const std::string& engine, std::vector<std::string> more) {
  more.insert(more.begin(), {"fuzz", "--runs", "60", "--decisions", engine});
  return run_lockstep(more);
}

TEST(Decisions, OfASoundEngineAgreeAndTwoRunsAreOneReport) {
  const std::string one = temporary_path("one.json"), two = temporary_path("two.json");
  const Outcome first = fuzz(kEngine, {"--json", one});
  EXPECT_EQ(first.status, 0) << first.out << first.err;
  EXPECT_EQ(fuzz(kEngine, {"--json", two}).status, 0);
  EXPECT_EQ(read_text(one), read_text(two));
  EXPECT_NE(read_text(one).find("\"decided_by\":\"paged-1.0\""), std::string::npos);
}

TEST(Decisions, AMistakeIsShrunkToldAndKeptAsARecording) {
  const std::string folder = temporary_path("found");
  const Outcome found = fuzz(kEngine + " --bug lost", {"--save", folder, "--shrink-seconds", "5"});
  EXPECT_EQ(found.status, 1) << found.err;
  EXPECT_NE(found.out.find("--decisions '" + kEngine + " --bug lost'"), std::string::npos)
      << found.out;
  const std::size_t at = found.out.find(".min.case.jsonl");
  ASSERT_NE(at, std::string::npos) << found.out;
  const std::size_t begin = found.out.rfind(' ', at) + 1;
  const std::string name = found.out.substr(begin, at - begin);
  const Outcome audit = run_lockstep({"audit", name + ".min.recording.jsonl"});
  EXPECT_EQ(audit.status, 1) << audit.out << audit.err;
  EXPECT_NE(audit.out.find("audit.conservation"), std::string::npos) << audit.out;
  const Outcome explanation =
      run_lockstep({"explain", name + ".min.case.jsonl", "--decisions", kEngine + " --bug lost"});
  EXPECT_EQ(explanation.status, 1) << explanation.err;
  EXPECT_NE(explanation.out.find("Here it fails: audit.conservation"), std::string::npos)
      << explanation.out;
}

TEST(Decisions, InputsThatNeedMoreThanTheEngineAreRefusedAtTheStart) {
  for (const std::string_view name :
       {"shared_prefixes.jsonl", "recordings/vllm-0.33.0/preemption/0002.jsonl"}) {
    const Outcome refused =
        run_lockstep({"replay", sample_path(name), "--backend", "none", "--decisions", kEngine});
    EXPECT_EQ(refused.status, 2) << refused.out;
    EXPECT_NE(refused.err.find("paged-1.0: the engine does not support reset_prefix_cache"),
              std::string::npos)
        << refused.err;
  }
}

// The recorded engine broke its token budget: 8 tokens in step 0, where the example computes 4. So
// the token that it sampled there belongs to no row of the example.
TEST(Decisions, AnEngineIsNotJudgedByRecordedDecisionsOrOutputsOfOthers) {
  const std::string path = temporary_path("budget.jsonl");
  for (const std::string engine : {R"("mine","version":"1")", R"("vllm","version":"0.33.0")"}) {
    write_text(
        path,
        R"({"schedule_recording":1,"engine":{"name":)" + engine +
            R"(},"family":"",)"
            R"("seed":0,"config":{"max_num_seqs":4,"max_num_batched_tokens":4,)"
            R"("max_model_len":64,"block_size":16,"enable_prefix_caching":false,)"
            R"("async_scheduling":false},"groups":[{"layers":["layers.0"],"spec":{"type":"full",)"
            R"("block_size":16,"num_kv_heads":1,"head_size":64,"dtype":"bf16"}}],"num_blocks":9,)"
            R"("scheduler_block_size":16,"hash_block_size":16}
{"step":0,"before":[{"add":"a","prompt":{"tokens":[1,2,3,4,5,6,7,8]},"max_tokens":2,)"
            R"("arrival":0.0}],)"
            R"("scheduled":[{"id":"a","tokens":8,"new":true,"computed":0,"blocks":[[1]]}],)"
            R"("running":["a"],"waiting":[],"free_blocks":7,"sampled":{"a":[2]}}
{"step":1,"scheduled":[{"id":"a","tokens":1,"computed":8,"blocks":null}],"running":["a"],)"
            R"("waiting":[],"free_blocks":7,"sampled":{"a":[2]},"stopped":[["a","length"]]}
{"end":true,"steps":2,"unfinished":["a"]}
)");
    const Outcome run = run_lockstep({"replay", path, "--backend", "none", "--decisions", kEngine});
    EXPECT_EQ(run.status, 0) << run.out << run.err;
    EXPECT_NE(run.out.find("step 0 and later steps: the recorded outputs belong to other"),
              std::string::npos)
        << run.out;
  }
  const Outcome model = run_lockstep({"replay", path, "--backend", "none", "--decide", "model"});
  EXPECT_EQ(model.status, 1) << model.err;
  EXPECT_NE(model.out.find("the recording differs from the model in step 0"), std::string::npos)
      << model.out;
  EXPECT_EQ(run_lockstep({"explain", path, "--decisions", kEngine}).status, 0);
}

// The example with one line changed.
std::string changed_engine(const std::string& name, const std::string& from,
                           const std::string& to) {
  std::string text = read_text(LOCKSTEP_SOURCE_DIR "/docs/examples/paged_engine.py");
  const std::size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  const std::string path = temporary_path(name + ".py");
  write_text(path, text.replace(at, from.size(), to));
  return "python3 " + path;
}

// Each reports too little or a wrong count.
Outcome fuzz_changed(const std::string& name, const std::string& from, const std::string& to) {
  return fuzz(changed_engine(name, from, to), {});
}

TEST(Decisions, AFailureThatDoesNotShowAgainIsSavedAsItWasFound) {
  const std::string folder = temporary_path("flaky"), mark = temporary_path("mark");
  const std::string once = "table[1:] if not __import__('os').path.exists('" + mark +
                           "') and open('" + mark + "', 'w') else table";
  const std::string engine =
      changed_engine("flaky", R"(table[1:] if BUG == "lost" else table)", once);
  const Outcome found = fuzz(engine, {"--save", folder});
  EXPECT_EQ(found.status, 1) << found.out << found.err;
  EXPECT_NE(found.out.find("not shrunk: "), std::string::npos) << found.out;
  EXPECT_EQ(found.out.find(".min.case.jsonl"), std::string::npos) << found.out;
}

TEST(Decisions, CountsThatTheOutputDoesNotLeadToAreTold) {
  const std::string known = "known[name] = request[\"tokens\"]";
  for (const std::string& to : {known + " + 1", std::string("pass")}) {
    const Outcome found = fuzz_changed("counts", known, to);
    EXPECT_EQ(found.status, 1) << found.out << found.err;
    EXPECT_NE(found.out.find("  reply:num_tokens: "), std::string::npos) << found.out;
  }
}

TEST(Decisions, WithoutAConnectorNothingIsHeldAndNoRunningRequestIsSkipped) {
  const std::string state = "return {\"num_tokens\": known}";
  const Outcome held = fuzz_changed("held", state, state + " | {\"held\": self.running}");
  EXPECT_EQ(held.status, 1) << held.out << held.err;
  EXPECT_NE(held.out.find("without a connector"), std::string::npos) << held.out;
  const Outcome skipped = fuzz_changed("skipped", "return queues |",
                                       "queues[\"skipped\"] = [[r, \"WAITING\"] for r in "
                                       "self.running]\n        return queues |");
  EXPECT_EQ(skipped.status, 1) << skipped.out << skipped.err;
  EXPECT_NE(skipped.out.find("reply:skipped: "), std::string::npos) << skipped.out;
}

TEST(Decisions, WhatTheEngineDoesNotReportIsNotChecked) {
  const Outcome tables = fuzz_changed("tables", "if tables:", "if False:");
  EXPECT_EQ(tables.status, 0) << tables.out << tables.err;
  EXPECT_NE(tables.out.find("  - block tables: "), std::string::npos) << tables.out;
  const Outcome some = fuzz_changed("some", "in self.running}\n", "in self.running[1:]}\n");
  EXPECT_EQ(some.status, 0) << some.out << some.err;
  EXPECT_NE(some.out.find("  - block tables: "), std::string::npos) << some.out;
  const Outcome counts =
      fuzz_changed("stored", "{\"free_blocks\"", "{\"stored\": 1, \"free_blocks\"");
  EXPECT_EQ(counts.status, 0) << counts.out << counts.err;
  EXPECT_NE(counts.out.find("  - counts of block hashes"), std::string::npos) << counts.out;
  const Outcome free = fuzz_changed("free", "len(self.free)}", "None}");
  EXPECT_EQ(free.status, 0) << free.out << free.err;
  EXPECT_NE(free.out.find("  - free blocks: "), std::string::npos) << free.out;
  EXPECT_NE(free.out.find("  - whether hits are lost without a reason: "), std::string::npos);
}

TEST(Decisions, ABlockSizeThatARecordingMayNotHaveIsAWrongReply) {
  const Outcome run = fuzz_changed("sizes", "dict.fromkeys(sizes, self.block_size)",
                                   "dict.fromkeys(sizes, self.block_size + 1)");
  EXPECT_EQ(run.status, 1) << run.out << run.err;
  EXPECT_NE(run.out.find("field `opened.scheduler_block_size`: found "), std::string::npos)
      << run.out;
}

TEST(Decisions, AStopWithoutAStopTokenIsFoundInItsRecording) {
  const std::string folder = fresh_path("stops");
  const std::string engine = changed_engine("stops", "[name, \"length\"]", "[name, \"stop\"]");
  ASSERT_EQ(fuzz(engine, {"--save", folder, "--no-shrink", "--failures", "1"}).status, 1);
  for (const auto& file : std::filesystem::directory_iterator(folder)) {
    if (!file.path().string().ends_with(".recording.jsonl")) continue;
    const Outcome audit = run_lockstep({"audit", file.path()});
    EXPECT_EQ(audit.status, 1) << audit.out << audit.err;
    EXPECT_NE(audit.out.find("ends by a stop token, and none"), std::string::npos) << audit.out;
  }
}

TEST(Decisions, AnUnknownRequestIsNamedWithItsKey) {
  const Outcome run = fuzz_changed("ghost", "return queues |",
                                   "return {\"loading\": {\"ghost\": [[1]]}} | queues |");
  EXPECT_NE(run.out.find("  reply:loading: `ghost` "), std::string::npos) << run.out;
}

TEST(Decisions, LastWordsThatAreNotTextAreReproduced) {
  const std::string folder = fresh_path("words");
  const std::string engine =
      changed_engine(
          "words", "raise AssertionError(\"step 5\")",
          "__import__('os').write(2, b'\\xff\\xfe\\x1b[31m bad\\n'); __import__('os')._exit(3)") +
      " --bug raise";
  const Outcome found = fuzz(engine, {"--save", folder, "--no-shrink", "--failures", "1"});
  ASSERT_EQ(found.status, 1) << found.out << found.err;
  EXPECT_NE(found.out.find("???[31m bad"), std::string::npos) << found.out;
  for (const auto& file : std::filesystem::directory_iterator(folder)) {
    if (!file.path().string().ends_with(".case.jsonl")) continue;
    const Outcome again = run_lockstep({"replay", file.path(), "--decisions", engine});
    EXPECT_EQ(again.status, 1) << again.out << again.err;
  }
}

// A program in place of an interpreter, which names itself.
std::string interpreter(const std::string& name) {
  const std::string folder = temporary_path(name);
  std::filesystem::create_directories(folder + "/bin");
  const std::string path = folder + "/bin/python";
  write_text(path, "#!/bin/sh\necho 'started by " + name + "' >&2\nexit 78\n");
  std::filesystem::permissions(path, std::filesystem::perms::owner_all);
  return path;
}

TEST(Decisions, TheInterpreterIsTheOptionsElseTheEnvironmentsElseTheVariables) {
  const std::string option = interpreter("option"), active = interpreter("active"),
                    variable = interpreter("variable");
  const std::string environment = active.substr(0, active.rfind("/bin/"));
  const auto refusal = [](std::vector<std::string> more, std::vector<std::string> variables) {
    more.insert(more.begin(), {"fuzz", "--runs", "1", "--decisions", "vllm"});
    variables.push_back("PATH=/usr/bin:/bin");
    const Outcome run = run_program(LOCKSTEP_COMMAND, more, variables);
    EXPECT_EQ(run.status, 2) << run.out << run.err;
    return run.err;
  };
  EXPECT_EQ(refusal({"--engine-python", option},
                    {"VIRTUAL_ENV=" + environment, "LOCKSTEP_PYTHON=" + variable}),
            "lockstep: --decisions: started by option\n");
  EXPECT_EQ(refusal({}, {"VIRTUAL_ENV=" + environment, "LOCKSTEP_PYTHON=" + variable}),
            "lockstep: --decisions: started by active\n");
  EXPECT_EQ(refusal({}, {"LOCKSTEP_PYTHON=" + variable}),
            "lockstep: --decisions: started by variable\n");
  EXPECT_EQ(refusal({}, {"LOCKSTEP_PYTHON=/nowhere/python"}),
            "lockstep: --decisions vllm: LOCKSTEP_PYTHON names /nowhere/python, which does not "
            "exist; give the interpreter of an environment with --engine-python\n");
}

TEST(Decisions, ARefusalWithOtherKeysIsAWrongReply) {
  const std::string both = R"( | sed -u 's/^{"opened".*/{"refused":"no","opened":{}}/')";
  const Outcome found = run_lockstep({"fuzz", "--runs", "4", "--decisions", kEngine + both});
  EXPECT_EQ(found.status, 1) << found.out << found.err;
  EXPECT_NE(found.out.find("engine.reply"), std::string::npos) << found.out;
  EXPECT_NE(found.out.find("opened"), std::string::npos) << found.out;
}

// Whatever this machine has installed: the sources import a package that does not exist.
TEST(Decisions, AMissingPackageIsOneSentenceWithTheCommandThatFixesIt) {
  const std::string folder = temporary_path("sources");
  std::filesystem::create_directories(folder + "/vllm");
  write_text(folder + "/vllm/__init__.py", "import a_package_that_no_machine_has\n");
  for (const std::string option : {"--decisions", "--backend"}) {
    const Outcome run = run_lockstep({"fuzz", "--runs", "1", option, "vllm:" + folder});
    EXPECT_EQ(run.status, 2) << run.out << run.err;
    EXPECT_TRUE(run.err.starts_with("lockstep: " + option + ": vllm needs ")) << run.err;
    EXPECT_TRUE(run.err.find("; run `") != std::string::npos) << run.err;
    EXPECT_EQ(std::ranges::count(run.err, '\n'), 1) << run.err;
    EXPECT_EQ(run.out, "");
  }
}

TEST(Decisions, ARecordingOfAFailedEngineHoldsItsFailure) {
  const std::string folder = fresh_path("raised");
  const Outcome found =
      fuzz(kEngine + " --bug raise", {"--save", folder, "--no-shrink", "--failures", "1"});
  ASSERT_EQ(found.status, 1) << found.err;
  const std::size_t at = found.out.find(".recording.jsonl");
  ASSERT_NE(at, std::string::npos) << found.out;
  const std::size_t begin = found.out.rfind(' ', at) + 1;
  const std::string path = found.out.substr(begin, at - begin) + ".recording.jsonl";
  for (const std::string command : {"audit", "replay", "explain", "shrink"}) {
    std::vector<std::string> words = {command, path};
    if (command == "replay") words.insert(words.end(), {"--backend", "none"});
    const Outcome told = run_lockstep(words);
    EXPECT_EQ(told.status, 1) << command << told.out << told.err;
    EXPECT_NE(told.out.find("engine.exception"), std::string::npos) << command << told.out;
  }
}

TEST(Decisions, ASavedCaseSaysWhoDecidedAndAReplayWithoutThatEngineSaysSo) {
  const std::string folder = temporary_path("said");
  const Outcome found = fuzz(kEngine + " --bug lost", {"--save", folder, "--no-shrink"});
  ASSERT_EQ(found.status, 1) << found.err;
  const std::size_t at = found.out.find(".case.jsonl");
  ASSERT_NE(at, std::string::npos) << found.out;
  const std::size_t begin = found.out.rfind(' ', at) + 1;
  const std::string path = found.out.substr(begin, at - begin) + ".case.jsonl";
  EXPECT_NE(read_text(path).find(R"("decided_by":{"name":"paged","version":"1.0"})"),
            std::string::npos);
  // A replay without a backend has no mode of checking.
  std::string text = read_text(path);
  for (const std::string mode : {"\"check\":\"check\"", "\"check\":\"hunt\""})
    if (const std::size_t found_at = text.find(mode); found_at != std::string::npos)
      text.replace(found_at, mode.size(), "\"check\":\"fast\"");
  write_text(path, text);
  for (const std::string command : {"replay", "explain", "shrink"}) {
    const Outcome model = run_lockstep({command, path});
    EXPECT_NE(model.out.find("paged-1.0 decided when this case failed. Here the model of "),
              std::string::npos)
        << command << model.out << model.err;
  }
  const Outcome itself = run_lockstep({"replay", path, "--decisions", kEngine});
  EXPECT_EQ(itself.out.find("when this case failed"), std::string::npos) << itself.out;
}

// The model behind the protocol is the one of 0.22.1, and of no other release.
TEST(Decisions, AreHeldAgainstTheModelFieldByField) {
  const std::string model = LOCKSTEP_BINARY_DIR "/model_engine";
  const Outcome same = fuzz(model, {"--engine", "vllm-0.22.1", "--conform"});
  EXPECT_EQ(same.status, 0) << same.out << same.err;
  const Outcome other = fuzz(model, {"--engine", "vllm-0.33.0", "--conform"});
  EXPECT_EQ(other.status, 1) << other.out << other.err;
  EXPECT_NE(other.out.find(", conform."), std::string::npos) << other.out;
  EXPECT_NE(other.out.find("the model of vllm-0.33.0 "), std::string::npos) << other.out;
  EXPECT_EQ(run_lockstep({"fuzz", "--conform"}).status, 2);
}

TEST(Decisions, ThatDifferFromTheModelAreSavedShrunkToldAndReplayed) {
  const std::string model = LOCKSTEP_BINARY_DIR "/model_engine";
  const std::string folder = temporary_path("differ");
  const Outcome found = fuzz(model, {"--engine", "vllm-0.33.0", "--conform", "--failures", "1",
                                     "--save", folder, "--shrink-seconds", "5"});
  ASSERT_EQ(found.status, 1) << found.out << found.err;
  const std::size_t at = found.out.find(".min.case.jsonl");
  ASSERT_NE(at, std::string::npos) << found.out;
  const std::size_t begin = found.out.rfind(' ', at) + 1;
  const std::string path = found.out.substr(begin, at - begin) + ".min.case.jsonl";
  EXPECT_NE(read_text(path).find(R"("expected":{"kind":"mismatch",)"), std::string::npos);
  const Outcome again =
      run_lockstep({"replay", path, "--decisions", model, "--conform", "--backend", "none"});
  EXPECT_EQ(again.status, 1) << again.out << again.err;
  EXPECT_NE(again.out.find("THE ENGINE DECIDES DIFFERENTLY in step "), std::string::npos)
      << again.out;
  EXPECT_NE(again.out.find("The case is reproduced."), std::string::npos) << again.out;
  const Outcome explanation = run_lockstep({"explain", path, "--decisions", model, "--conform"});
  EXPECT_EQ(explanation.status, 1) << explanation.err;
  EXPECT_NE(explanation.out.find("Here it fails: conform."), std::string::npos) << explanation.out;
  const Outcome without = run_lockstep({"replay", path, "--decisions", model});
  EXPECT_NE(without.out.find("THE ENGINE DECIDES DIFFERENTLY"), std::string::npos)
      << "the case itself says what failed it\n"
      << without.out;
}

// A request of the recording is refused by the engine, so another one runs earlier than recorded:
// its tokens are unknown. Here they are deleted. A request arrives while the last step runs.
TEST(Decisions, EndWhereTheyNeedTokensThatTheRecordingDoesNotHave) {
  std::string text = read_text(std::string(LOCKSTEP_SOURCE_DIR) +
                               "/tests/regressions/id_used_again_in_a_step.jsonl");
  for (const auto& [from, to] : {std::pair<std::string, std::string>{R"({"b":[1003]})", "{}"},
                                 {R"(,"prefix_cache_retention_interval":0)", ""},
                                 {R"("0.33.0")", R"("0.22.1")"}}) {
    ASSERT_NE(text.find(from), std::string::npos) << from;
    text.replace(text.find(from), from.size(), to);
  }
  const std::string path = temporary_path("unsampled.jsonl");
  std::ofstream(path) << text;
  const Outcome run = run_lockstep(
      {"replay", path, "--backend", "none", "--decisions", LOCKSTEP_BINARY_DIR "/model_engine"});
  EXPECT_EQ(run.status, 0) << run.out << run.err;
  EXPECT_NE(run.out.find("step 4 and later steps: they continue with tokens"), std::string::npos)
      << run.out;
}

TEST(Decisions, AreHeldToRelationsWithoutAModel) {
  const std::string model = LOCKSTEP_BINARY_DIR "/model_engine";
  const Outcome held = run_lockstep({"relations", "--runs", "20", "--decisions", model});
  EXPECT_EQ(held.status, 0) << held.out << held.err;
  EXPECT_NE(held.out.find("0 of "), std::string::npos) << held.out;
  EXPECT_EQ(held.out.find("shuffled blocks"), std::string::npos) << held.out;
  const Outcome of_places = run_lockstep({"relations", "shuffled blocks", "--decisions", model});
  EXPECT_EQ(of_places.status, 2) << of_places.out;
}

TEST(Decisions, HaveDefectsOfABackendFoundBelowThem) {
  const std::string model = LOCKSTEP_BINARY_DIR "/model_engine";
  const Outcome found = run_lockstep(
      {"mutants", "drop-slot", "wrong-stride", "--decisions", model, "--shrink", "50"});
  EXPECT_EQ(found.status, 0) << found.out << found.err;
  EXPECT_NE(found.out.find("2 of 2 mutants caught"), std::string::npos) << found.out;
  const Outcome decided = run_lockstep({"mutants", "free-twice", "--decisions", model});
  EXPECT_EQ(decided.status, 2);
  EXPECT_NE(decided.err.find("a defect of the site scheduler"), std::string::npos) << decided.err;
  const Outcome two = run_lockstep({"mutants", "drop-slot", "--decisions", model, "--jobs", "2"});
  EXPECT_EQ(two.status, 2) << two.out;
}

// The example in C++, which has nothing of this project.
TEST(Decisions, OfTheExampleInCppAgree) {
  const Outcome agreed = fuzz(LOCKSTEP_BINARY_DIR "/paged_engine", {});
  EXPECT_EQ(agreed.status, 0) << agreed.out << agreed.err;
  EXPECT_NE(agreed.out.find("of known findings, 0 failed"), std::string::npos) << agreed.out;
}

TEST(Decisions, WhatIsKnownIsNoNewsUntilItsDayIsOver) {
  const auto known = [](const std::string& until) {
    const std::string path = temporary_path("known" + until + ".json");
    write_text(path, R"({"lockstep_known":1,"known":[{"id":"ENG-42","check":"engine.exception",)"
                     R"("text":"step 5","until":")" +
                         until + "\"}]}\n");
    return path;
  };
  const std::string engine = kEngine + " --bug raise";
  const Outcome now = fuzz(engine, {"--known", known("2999-12-31")});
  EXPECT_EQ(now.status, 0) << now.out;
  EXPECT_NE(now.out.find("known: ENG-42: "), std::string::npos) << now.out;
  const Outcome later = fuzz(engine, {"--known", known("2001-01-01")});
  EXPECT_EQ(later.status, 1) << later.out;
  EXPECT_NE(later.out.find("ENG-42: known until 2001-01-01; reported again"), std::string::npos);
  const Outcome wrong = fuzz(engine, {"--known", known("soon")});
  EXPECT_EQ(wrong.status, 2);
  EXPECT_NE(wrong.err.find("expected a date"), std::string::npos) << wrong.err;
}

// Judged by all rules, such an engine fails in its first step.
TEST(Decisions, OfAnEngineThatReservesAllBlocksAreAuditedWithoutRulesAboutPolicy) {
  const std::string engine =
      changed_engine("reserve", R"(self.give(name, request["computed"] + tokens, preempted))",
                     R"(self.give(name, request["last"], preempted))");
  const Outcome by_all = fuzz(engine, {});
  EXPECT_EQ(by_all.status, 1) << by_all.err;
  EXPECT_NE(by_all.out.find("audit.excess_blocks"), std::string::npos) << by_all.out;
  const Outcome agreed = fuzz(engine, {"--audit-policy", "off"});
  EXPECT_EQ(agreed.status, 0) << agreed.out << agreed.err;
  EXPECT_NE(agreed.out.find("  - rules about policy: "), std::string::npos) << agreed.out;
  const Outcome speaks = run_lockstep({"check-adapter", engine});
  EXPECT_EQ(speaks.status, 0) << speaks.out << speaks.err;
  // A saved failure is judged again by the same rules, without the option.
  const std::string folder = temporary_path("reserving");
  EXPECT_EQ(fuzz(engine + " --bug lost",
                 {"--audit-policy", "off", "--failures", "1", "--no-shrink", "--save", folder})
                .status,
            1);
  for (const auto& file : std::filesystem::directory_iterator(folder)) {
    const std::string path = file.path().string();
    if (!path.ends_with(".case.jsonl")) continue;
    for (const std::string command : {"replay", "explain", "shrink"}) {
      const Outcome again = run_lockstep({command, path, "--decisions", engine + " --bug lost"});
      EXPECT_EQ(again.status, 1) << command << again.out << again.err;
      EXPECT_NE(again.out.find("audit.conservation"), std::string::npos) << again.out;
    }
  }
}

TEST(Decisions, ARunningRequestThatIsNeverScheduledIsNotCalledPreempted) {
  const Outcome running = fuzz_changed(
      "starve", "if name in preempted or (is_new and preempted):",
      "if name in preempted or (is_new and preempted) or (name == 'r1' and not is_new):");
  EXPECT_EQ(running.status, 3) << running.out << running.err;
  EXPECT_NE(running.out.find("request r1 runs with "), std::string::npos) << running.out;
  EXPECT_EQ(running.out.find("is preempted before"), std::string::npos) << running.out;
  // All blocks are free.
  const std::string path = temporary_path("idle.jsonl");
  write_text(path, trace_of({R"({"id":"a","t":0,"prompt":[[1,40]],"output":{"length":9}})",
                             R"({"id":"b","t":0,"prompt":[[2,30]],"output":{"length":9}})"}));
  const Outcome waiting =
      run_lockstep({"replay", path, "--backend", "none", "--no-async-scheduling", "--decisions",
                    changed_engine("idle", "in [*self.running, *self.waiting]:", "in []:")});
  EXPECT_EQ(waiting.status, 3) << waiting.out << waiting.err;
  EXPECT_NE(waiting.out.find("  b: needs about"), std::string::npos) << waiting.out;
  EXPECT_EQ(waiting.out.find("do not fit"), std::string::npos) << waiting.out;
}

// The case without its verdict, so that the run itself shows the failure.
TEST(Decisions, OfAReplayThatFailsByAKnownFindingNameIt) {
  std::string text =
      read_text(LOCKSTEP_SOURCE_DIR "/tests/regressions/loads_and_preemptions_in_turn.case.jsonl");
  const std::size_t begin = text.find(R"("expected":{)");
  ASSERT_NE(begin, std::string::npos);
  const std::size_t end = text.find('}', begin) + 1;
  text.erase(begin, end - begin + (text[end] == ',' ? 1 : 0));
  const std::string path = temporary_path("known.case.jsonl"), json = temporary_path("known.json");
  write_text(path, text);
  const Outcome found = run_lockstep({"replay", path, "--backend", "none", "--decisions",
                                      LOCKSTEP_BINARY_DIR "/model_engine", "--json", json});
  EXPECT_EQ(found.status, 3) << found.out << found.err;
  EXPECT_NE(found.out.find("This is finding "), std::string::npos) << found.out;
  EXPECT_NE(read_text(json).find("\"finding\":"), std::string::npos) << read_text(json);
}

TEST(Decisions, AreExecutedAuditedAndTheirEnginesFailureIsAVerdict) {
  const std::string path = temporary_path("two.jsonl");
  write_text(path,
             trace_of({R"({"id":"a","t":0,"prompt":[[1,40]],"output":{"length":9}})",
                       R"({"id":"b","t":0,"prompt":[[2,30]],"output":{"length":9}})",
                       R"({"id":"c","t":1000000000,"prompt":[[3,30]],"output":{"length":9}})"}));
  const std::vector<std::string> replay = {
      "replay", path, "--backend", "simt", "--no-async-scheduling", "--decisions"};
  auto sound = replay, broken = replay, leaking = replay;
  sound.push_back(kEngine);
  broken.push_back(kEngine + " --bug raise");
  leaking.push_back(kEngine + " --bug lost");
  const Outcome agreed = run_lockstep(sound);
  EXPECT_EQ(agreed.status, 0) << agreed.out << agreed.err;
  EXPECT_NE(agreed.out.find("The engine's decisions compared equal in every step; their audit has "
                            "no finding."),
            std::string::npos)
      << agreed.out;
  // No page shows a block that is lost.
  const Outcome leaks = run_lockstep(leaking);
  EXPECT_EQ(leaks.status, 1) << leaks.out << leaks.err;
  EXPECT_NE(leaks.out.find("Verdict: audit.conservation in step "), std::string::npos) << leaks.out;
  const Outcome failed = run_lockstep(broken);
  EXPECT_EQ(failed.status, 1) << failed.err;
  EXPECT_NE(failed.out.find("THE ENGINE FAILED in step 5 (engine.exception)"), std::string::npos)
      << failed.out;
}

// The number after a key of a result.
std::string number_of(const std::string& json, const std::string& key) {
  const std::size_t begin = json.find("\"" + key + "\":") + key.size() + 3;
  return json.substr(begin, json.find(',', begin) - begin);
}

// The pool is too small for the prompts, so the second request of each prompt loads from the tier.
TEST(Decisions, MeetAHostTierThatStoresAndLoads) {
  std::vector<std::string> requests;
  for (int i = 0; i < 12; ++i)
    requests.push_back(
        fmt::format(R"({{"id":"r{}","t":{},"prompt":[[{},160]],"output":{{"length":9}}}})", i,
                    i * 1'000'000'000LL, i % 4 + 1));
  const std::string path = temporary_path("tier.jsonl");
  write_text(path, trace_of(requests));
  for (const std::string backend : {"none", "simt"}) {
    const std::string theirs = temporary_path(backend + "-theirs.json"),
                      ours = temporary_path(backend + "-ours.json");
    const std::vector<std::string> replay = {"replay",
                                             path,
                                             "--backend",
                                             backend,
                                             "--engine",
                                             "vllm-0.22.1",
                                             "--num-blocks",
                                             "24",
                                             "--connector",
                                             "host",
                                             "--host-blocks",
                                             "60",
                                             "--transfer-delay",
                                             "1",
                                             "--no-async-scheduling",
                                             "--json"};
    auto here = replay, there = replay;
    here.push_back(ours);
    there.insert(there.end(), {theirs, "--decisions", LOCKSTEP_BINARY_DIR "/model_engine"});
    EXPECT_EQ(run_lockstep(here).status, 0) << backend;
    const Outcome run = run_lockstep(there);
    EXPECT_EQ(run.status, 0) << backend << run.out << run.err;
    for (const std::string key : {"blocks_loaded", "blocks_stored", "host_evictions"}) {
      const std::string count = number_of(read_text(theirs), key);
      EXPECT_NE(count, "0") << backend << " " << key;
      EXPECT_EQ(count, number_of(read_text(ours), key)) << backend << " " << key;
    }
  }
}

// Loads of several groups fail by request. The model in another process ends the same requests.
TEST(Decisions, AreNotifiedOfLoadsThatFailAsAWhole) {
  const Outcome run = run_lockstep(
      {"replay",
       LOCKSTEP_SOURCE_DIR "/tests/conformance/newer_connectors/groups_failed_fail_0015.jsonl",
       "--backend", "none", "--conform", "--decisions",
       LOCKSTEP_BINARY_DIR "/model_engine 0.33.0"});
  EXPECT_EQ(run.status, 0) << run.out << run.err;
}

// The engine claims to have HiSparse's groups, but no message could report a copied page.
TEST(Decisions, OfHiSparseAreRefused) {
  const std::string engine =
      R"(echo '{"hello":{"scheduler_protocol":1,"engine":{"name":"mine","version":"1"},)"
      R"("features":["mla","hisparse_resident","hisparse_hot","connector"]}}'; cat >/dev/null)";
  const Outcome run =
      run_lockstep({"replay", LOCKSTEP_SOURCE_DIR "/tests/conformance/hisparse/hisparse/0011.jsonl",
                    "--backend", "none", "--decisions", engine});
  EXPECT_EQ(run.status, 2) << run.out;
  EXPECT_NE(run.err.find("the scheduler protocol has no messages about its pages"),
            std::string::npos)
      << run.err;
}

TEST(Decisions, OfNoEngineAreRefused) {
  const Outcome none = fuzz("no-such-program-here", {});
  EXPECT_EQ(none.status, 2);
  EXPECT_NE(none.err.find("no-such-program-here"), std::string::npos) << none.err;
  const Outcome folder = fuzz("vllm:/no/such/folder", {});
  EXPECT_EQ(folder.status, 2);
  EXPECT_NE(folder.err.find("no folder /no/such/folder"), std::string::npos) << folder.err;
  const Outcome planted = fuzz(kEngine, {"--mutant", "drop-slot"});
  EXPECT_EQ(planted.status, 2);
  EXPECT_NE(planted.err.find("--mutant does not apply to --decisions"), std::string::npos)
      << planted.err;
}

}  // namespace
}  // namespace lockstep::tests
