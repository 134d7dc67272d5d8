// What a user can get wrong ends with status 2 and one error message on stderr that names it;
// nothing is printed as if it were a result.
#include <gtest/gtest.h>

#include "tests/cli/command.h"

namespace lockstep::tests {
namespace {

constexpr const char* kTrace = R"({"trace":"lockstep","version":1})"
                               "\n";

struct Refusal {
  const char* name;
  std::vector<std::string> arguments;
  const char* names;  // a word of the message
};

const std::string kCase =
    LOCKSTEP_SOURCE_DIR "/tests/regressions/eagle_beside_states_alone.case.jsonl";

class Refused : public testing::TestWithParam<Refusal> {};

TEST_P(Refused, WithStatusTwoAndTheCulpritNamed) {
  const Outcome outcome = run_lockstep(GetParam().arguments);
  EXPECT_EQ(outcome.status, 2);
  EXPECT_NE(outcome.err.find(GetParam().names), std::string::npos) << outcome.err;
  EXPECT_EQ(outcome.out.find("Verdict"), std::string::npos) << outcome.out;
}

INSTANTIATE_TEST_SUITE_P(
    Each, Refused,
    testing::Values(
        Refusal{"NoCommand", {}, "subcommand"}, Refusal{"UnknownCommand", {"fly"}, "fly"},
        Refusal{"NoFile", {"replay"}, "FILE"},
        Refusal{"UnknownOption", {"replay", kSample, "--blocks", "3"}, "--blocks"},
        Refusal{"UnknownConnector", {"replay", kSample, "--connector", "nfs"}, "--connector"},
        Refusal{"ATimeoutOfNoEngine",
                {"replay", kSample, "--decisions-timeout", "3"},
                "--decisions-timeout requires --decisions"},
        Refusal{"DelayedStreamsOfNoBackend",
                {"replay", kSample, "--backend", "none", "--delay-streams"},
                "--delay-streams"},
        Refusal{
            "HashesOfTwoEnginesInOneStream",
            {"replay", kSample, "--backend", "none", "--data-parallel-size", "2", "--hashes", "-"},
            "each of 2 data parallel ranks"},
        Refusal{"ASeedOfACaseThatOnlyTheJudgeRuns",
                {"replay",
                 LOCKSTEP_SOURCE_DIR "/tests/regressions/states_of_a_hit_of_no_tokens.case.jsonl",
                 "--seed", "5"},
                "omit --seed"},
        Refusal{"HostBlocksAlone", {"replay", kSample, "--host-blocks", "9"}, "--connector host"},
        Refusal{"NoHostBlocks",
                {"replay", kSample, "--connector", "host", "--host-blocks", "0"},
                "--host-blocks"},
        Refusal{
            "LoadFailuresAlone", {"replay", kSample, "--load-failures", "5"}, "--load-failures"},
        Refusal{"APartOfConnectorsThatNobodyKnows",
                {"replay", kSample, "--connector", "peers+nfs"},
                "peers+nfs"},
        Refusal{"FiveConnectors",
                {"replay", kSample, "--connector", "host+host+host+host+host"},
                "up to 4"},
        Refusal{"HostBlocksOfPeers",
                {"replay", kSample, "--connector", "peers+peers", "--host-blocks", "9"},
                "--connector host"},
        Refusal{"SeveralGroupsForAConnectorOfOne",
                {"replay", kSample, "--engine", "vllm-0.22.1", "--connector",
                 "one-group-peers+host", "--no-disable-hybrid-kv-cache-manager"},
                "one-group-peers does not"},
        Refusal{"ADefectOfHowConnectorsStartThatChangesNothing",
                {"replay", kSample, "--engine", "vllm-0.22.1", "--connector", "peers+host",
                 "--mutant", "hma-any"},
                "hma-any"},
        Refusal{"AnEngineThatAsksBeforeItsTierIsSet",
                {"replay", kSample, "--engine", "vllm-0.22.1", "--connector", "host", "--mutant",
                 "hma-before-config"},
                "no connector"},
        Refusal{"MoreThanAllLoads",
                {"replay", kSample, "--connector", "host", "--load-failures", "101"},
                "--load-failures"},
        Refusal{
            "TransferDelayAlone", {"replay", kSample, "--transfer-delay", "2"}, "--transfer-delay"},
        Refusal{"HostTierWithoutHashes",
                {"replay", kSample, "--engine", "vllm-0.22.1", "--connector", "host",
                 "--no-prefix-caching"},
                "--no-prefix-caching"},
        Refusal{"ConnectorOfAnUnmodelledEngine",
                {"replay", kSample, "--engine", "vllm-0.28.0", "--connector", "host"},
                "vllm-0.28.0"},
        Refusal{"ADefectOfAHostTierAlone",
                {"replay", kSample, "--mutant", "free-send-in-flight"},
                "--connector host"},
        Refusal{"MissingFile", {"replay", "nowhere.jsonl"}, "nowhere.jsonl"},
        Refusal{"AFolder", {"replay", LOCKSTEP_SOURCE_DIR}, LOCKSTEP_SOURCE_DIR},
        Refusal{"NotATrace", {"replay", sample_path("../CMakeLists.txt")}, "CMakeLists.txt"},
        Refusal{"PoolOfOneBlock", {"replay", kSample, "--num-blocks", "1"}, "--num-blocks"},
        Refusal{"NegativeBlockSize", {"replay", kSample, "--block-size", "-16"}, "--block-size"},
        Refusal{"NotANumber", {"replay", kSample, "--max-num-seqs", "many"}, "--max-num-seqs"},
        Refusal{"UnknownBackend", {"replay", kSample, "--backend", "tpu"}, "--backend"},
        Refusal{"UnknownPolicy", {"replay", kSample, "--policy", "lifo"}, "--policy"},
        Refusal{"UnknownEngine", {"replay", kSample, "--engine", "vllm-9.9.9"}, "vllm-9.9.9"},
        Refusal{"UnknownMutant",
                {"replay", kSample, "--backend", "simt", "--mutant", "no-such"},
                "no-such"},
        Refusal{"CheckWithoutABackend",
                {"replay", kSample, "--backend", "none", "--check", "hunt"},
                "--check"},
        Refusal{
            "CacheEventsWithoutTheEnginesHashes",
            {"replay", kSample, "--cache-events", "events.jsonl", "--hash-algorithm", "content"},
            "--hash-algorithm"},
        Refusal{"CacheEventsWithoutACache",
                {"replay", kSample, "--cache-events", "events.jsonl", "--no-prefix-caching"},
                "prefix caching"},
        Refusal{"GraphsWithoutABackend",
                {"replay", kSample, "--backend", "none", "--graphs", "8"},
                "--graphs"},
        Refusal{"GraphsOfNoToken",
                {"replay", kSample, "--backend", "simt", "--graphs", "0"},
                "--graphs"},
        Refusal{"AMutantOfGraphsWithoutGraphs",
                {"replay", kSample, "--backend", "simt", "--mutant", "graph-too-small"},
                "needs captured graphs"},
        Refusal{"PairOfSeveralRanks",
                {"pair", kSample, "--backend", "simt", "--pipeline-parallel-size", "2"},
                "--pipeline-parallel-size"},
        Refusal{"PairOfSeveralRanksWithoutPages",
                {"pair", kSample, "--tensor-parallel-size", "2"},
                "--backend none"},
        Refusal{"PairOfSeveralContextRanks",
                {"pair", kSample, "--decode-context-parallel-size", "2"},
                "only blocks of tensor parallel ranks"},
        Refusal{"PairWithFaults", {"pair", kSample, "--faults", "3"}, "--faults"},
        Refusal{"PairWithoutAStagingBuffer",
                {"pair", kSample, "--staging-blocks", "0"},
                "--staging-blocks"},
        Refusal{"PairOfAnEngineWithoutConnectors",
                {"pair", kSample, "--engine", "vllm-0.28.0"},
                "connector"},
        Refusal{"PairWithAMutantOfAnotherKind",
                {"pair", kSample, "--mutant", "drop-slot"},
                "drop-slot"},
        Refusal{"PairWithMoreLossThanThereIs", {"pair", kSample, "--loss", "101"}, "--loss"},
        Refusal{"PairWithAPrefillPoolTooSmall",
                {"pair", kSample, "--prefill-blocks", "1"},
                "--prefill-blocks"},
        Refusal{"NumbersWithoutABackend",
                {"replay", kSample, "--backend", "none", "--numbers", "real"},
                "--numbers"},
        Refusal{"UnknownNumbers",
                {"replay", kSample, "--backend", "simt", "--numbers", "imaginary"},
                "--numbers"},
        Refusal{"AMutantOfNumbersWithoutNumbers",
                {"replay", kSample, "--backend", "simt", "--mutant", "combine-unscaled"},
                "needs real numbers"},
        Refusal{"AMutantOfWordsAmongNumbers",
                {"replay", kSample, "--backend", "simt", "--numbers", "real", "--mutant", "race"},
                "race needs words"},
        Refusal{"NumbersOfHeadsTooLarge",
                {"replay", kSample, "--backend", "simt", "--numbers", "real", "--head-size", "640"},
                "576"},
        Refusal{"ScalesOfRowsThatLieOnNoMultipleOfFour",
                {"replay", kSample, "--backend", "simt", "--numbers", "real", "--dtype",
                 "int8_per_token_head", "--head-size", "30"},
                "multiples of 4"},
        Refusal{"NumbersOfGroupsThatAreNotWhole",
                {"replay", kSample, "--backend", "simt", "--numbers", "real", "--dtype", "nvfp4",
                 "--head-size", "40"},
                "multiple of 16"},
        Refusal{"NumbersInAnOrderWithoutRoomForTheirScales",
                {"replay", kSample, "--backend", "simt", "--numbers", "real", "--dtype", "nvfp4",
                 "--layout", "LHBNC"},
                "dense in its layer"},
        Refusal{"ScalesOfRowsThatStandForBothParts",
                {"replay", kSample, "--attention", "mla", "--dtype", "fp8_per_token_head"},
                "one row for both"},
        Refusal{"ScalesOfRowsThatStandForBothPartsInAModel",
                {"replay", kSample, "--model", "deepseek-v3", "--dtype", "int8_per_token_head"},
                "one row for both"},
        Refusal{"AFaultThatNobodyKnows",
                {"replay", kSample, "--backend", "none", "--faults", "explode@3"},
                "explode"},
        Refusal{"AFaultWithoutAStep",
                {"replay", kSample, "--backend", "none", "--faults", "abort_decode"},
                "KIND@STEP"},
        Refusal{"FaultsBesideARecording",
                {"replay", sample_path("recordings/vllm-0.22.1/preemption/0002.jsonl"), "--faults",
                 "1"},
                "--faults"},
        Refusal{"StreamsWithoutABackend",
                {"replay", kSample, "--backend", "none", "--streams", "2"},
                "--streams"},
        Refusal{"LateOperationsOfOneStream",
                {"replay", kSample, "--backend", "simt", "--delay-streams"},
                "--streams"},
        Refusal{"AnOrderLeftOutOfOneStream",
                {"replay", kSample, "--backend", "simt", "--mutant", "copy-unordered"},
                "copy-unordered"},
        Refusal{"FewerTokensThanRequests",
                {"replay", kSample, "--max-num-seqs", "64", "--max-num-batched-tokens", "32"},
                "--max-num-batched-tokens"},
        Refusal{"WholePromptsThatFitNoStep",
                {"replay", kSample, "--no-chunked-prefill", "--max-model-len", "4096",
                 "--max-num-seqs", "8", "--max-num-batched-tokens", "64"},
                "--no-chunked-prefill"},
        Refusal{"AModeOfStatesWithoutAModel",
                {"replay", kSample, "--mamba-cache-mode", "align"},
                "--mamba-cache-mode"},
        Refusal{"AModeOfStatesThatWasRemoved",
                {"replay", kSample, "--model", "llama-3.1-8b", "--backend", "none",
                 "--mamba-cache-mode", "all"},
                "all was removed"},
        Refusal{"AStepThatEndsWithinABlockOfStates",
                {"replay", kSample, "--model", "qwen3.5-0.8b", "--backend", "none", "--engine",
                 "vllm-0.22.1", "--max-num-seqs", "5", "--max-num-batched-tokens", "100"},
                "whole blocks of 544 tokens"},
        Refusal{"AHostTierForStates",
                {"replay", kSample, "--model", "qwen3.5-0.8b", "--backend", "none", "--connector",
                 "host"},
                "peers and host tiers load and store no states"},
        Refusal{"ARequestOfMoreBlocks",
                {"replay", kSample, "--model", "llama-3.1-8b", "--engine", "vllm-0.22.1",
                 "--max-model-len", "1024", "--num-blocks", "9"},
                "needs 64 blocks and the cache has 9 blocks"},
        Refusal{"NoCheckpointsWithoutAModel",
                {"replay", kSample, "--no-prefill-checkpoints"},
                "--no-prefill-checkpoints"},
        Refusal{"UnknownModel", {"replay", kSample, "--model", "gpt-9"}, "gpt-9"},
        Refusal{"ModelAndLayers",
                {"replay", kSample, "--model", "llama-3.1-8b", "--layers", "3"},
                "--layers"},
        Refusal{"ModelThatDoesNotFit",
                {"replay", kSample, "--model", "gemma-3-27b", "--num-blocks", "128"},
                "max_model_len"},
        Refusal{"RecordingWithOptions",
                {"replay", sample_path("recordings/vllm-0.22.1/preemption/0002.jsonl"),
                 "--num-blocks", "99"},
                "--num-blocks"},
        Refusal{"NotANumberOfSeconds", {"fuzz", "--seconds", "nan"}, "--seconds"},
        Refusal{"NotANumberOfAHitShare",
                {"audit", kSample, "--min-hit-share", "NaN"},
                "--min-hit-share"},
        Refusal{"UnknownLayoutOfACapacity",
                {"capacity", "llama-3.1-8b", "--layout", "abc"},
                "--layout: 'abc' is not NHD or HND"},
        Refusal{"LayoutOfANewerPlanner",
                {"capacity", "llama-3.1-8b", "--engine", "vllm-0.22.1", "--layout", "BLHNC"},
                "--layout: 'BLHNC' is not NHD or HND"},
        Refusal{
            "AFindingWithoutCases", {"findings", "30"}, "no case tests an engine for finding 30"},
        Refusal{"ADefectOfAWorkerThatDoesNotRun",
                {"replay", kSample, "--backend", "simt", "--plant", "no-such-defect"},
                "--plant applies only to an engine's own worker"},
        Refusal{"ARunnerOfAWorkerThatDoesNotRun",
                {"fuzz", "--runs", "1", "--runner", "v2"},
                "--runner applies only to an engine's own worker"},
        Refusal{"StatesOfAWorkerThatDoesNotRun",
                {"explain", kCase, "--states", "gdn"},
                "--states applies only to an engine's own worker"},
        Refusal{"StatesInFp8",
                {"layout", "--model", "jamba-mini", "--ssm-dtype", "fp8"},
                "--ssm-dtype fp8"},
        Refusal{"StatesOfKdaInFp16",
                {"layout", "--model", "kimi-linear-48b-a3b", "--ssm-dtype", "fp16"},
                "KDA in fp32"},
        Refusal{"AFormatOfRowsThatTheModelFixes",
                {"layout", "--model", "deepseek-v3.2", "--kv-dtype", "bf16"},
                "cache_dtype_str"},
        Refusal{"RanksThatDivideNoHeads",
                {"layout", "--model", "qwen3.5-27b", "--tp", "16"},
                "num_attention_heads 24"},
        Refusal{
            "StagesOfWhisper", {"layout", "--model", "whisper-large-v3", "--pp", "2"}, "--pp 2"},
        Refusal{"MoreRequestsThanTokensOfAStep",
                {"capacity", "llama-3.1-8b", "--max-num-seqs", "1000", "--max-num-batched-tokens",
                 "512"},
                "less than --max-num-seqs 1000"},
        Refusal{"RowsInAnotherFloat",
                {"layout", "--model", "llama-3.1-8b", "--kv-dtype", "fp16"},
                "--kv-dtype fp16: the model is served in bf16"},
        Refusal{"StateBlocksWithoutPrefixCaching",
                {"layout", "--model", "jamba-mini", "--mamba-block-size", "1024"},
                "--mamba-block-size 1024: only with prefix caching"},
        Refusal{"ABackendWithoutTheModelsRows",
                {"layout", "--model", "llama-3.1-8b", "--backend", "flashmla"},
                "non-MLA not supported"},
        Refusal{"AHiddenSizeOfNoHiddenStates",
                {"layout", "--model", "gemma-3-27b", "--hidden-size", "5"},
                "--hidden-size requires --hidden-states"},
        Refusal{"ADtypeOfNoStates",
                {"layout", "--model", "gemma-3-27b", "--ssm-dtype", "fp32"},
                "--ssm-dtype needs a --model with states; gemma-3-27b has none"},
        Refusal{"AModeOfNoStates",
                {"layout", "--model", "gemma-3-27b", "--mamba-cache-mode", "align"},
                "--mamba-cache-mode needs a --model with states"},
        Refusal{"AChunkOfNoStates",
                {"layout", "--model", "gemma-3-27b", "--mamba-block-size", "8"},
                "--mamba-block-size"},
        Refusal{"BlocksAndMemory",
                {"layout", "--model", "gemma-3-27b", "--num-blocks", "7000", "--memory", "40GiB"},
                "excludes --"},
        Refusal{"AnInterpreterThatIsNotThere",
                {"fuzz", "--runs", "1", "--backend", "none", "--engine-python", "/no/python"},
                "--engine-python: /no/python does not exist"},
        Refusal{"CasesWithoutAnEngine", {"findings", "--cases", "/nonexist"}, "--engine"},
        Refusal{"APromptOfNoTokens", {"capacity", "--prompt-tokens", "0"}, "--prompt-tokens"},
        Refusal{"NoGeneratedCase", {"relations", "--runs", "0"}, "--runs"},
        Refusal{"ConformOnATrace", {"conform", kSample}, "conform"},
        Refusal{"ConformOnNothing", {"conform", "nowhere"}, "nowhere"},
        Refusal{"AnotherEngineInADifferenceOfProfiles",
                {"diff-engines", kSample, "--decisions", "vllm"},
                "--decisions"},
        Refusal{"HashesOfADifferenceOfProfiles",
                {"diff-engines", kSample, "--hashes", fresh_path("hashes")},
                "--hashes"},
        Refusal{"ATimelineOfAPair", {"pair", kSample, "--perfetto", fresh_path("t")}, "--perfetto"},
        Refusal{"JsonIntoNowhere",
                {"replay", kSample, "--backend", "none", "--json", "no/such/folder/x.json"},
                "no/such/folder"}),
    [](const auto& refusal) { return std::string(refusal.param.name); });

// `lockstep fuzz --decisions "$UNSET"`: many options take an empty value as not given.
TEST(AnEmptyValue, IsRefusedForEveryOptionThatNeedsOne) {
  const std::vector<std::vector<std::string>> lines = {
      {"fuzz", "--runs", "1", "--backend", "none", "--decisions", ""},
      {"fuzz", "--runs", "1", "--backend", "none", "--decisions="},
      {"fuzz", "--runs", "1", "--backend", "none", "--mutant", ""},
      {"fuzz", "--runs", "1", "--backend", "none", "--shard", ""},
      {"fuzz", "--runs", "1", "--backend", "none", "--json", ""},
      {"conform", sample_path("recordings/vllm-0.22.1/preemption"), "--engine", ""},
      {"findings", "2", "--engine", ""},
      {"layout", "--model", ""},
      {"replay", kSample, "--backend", "none", "--faults", ""}};
  for (const std::vector<std::string>& words : lines) {
    const Outcome outcome = run_lockstep(words);
    std::string name = words.back().empty() ? words[words.size() - 2] : words.back();
    if (name.ends_with('=')) name.pop_back();
    EXPECT_EQ(outcome.status, 2) << words.front() << name;
    EXPECT_EQ(outcome.out, "") << words.front() << name;
    EXPECT_TRUE(outcome.err.starts_with(name + ": empty value\n")) << name << outcome.err;
  }
  EXPECT_TRUE(run_lockstep({"check-adapter", ""}).err.starts_with("ENGINE: empty value\n"));
  // Its value is optional.
  EXPECT_EQ(run_lockstep({"replay", kSample, "--backend", "none", "--connector"}).status, 0);
}

TEST(APipe, IsRefusedWhereAFileIsReadTwice) {
  const std::string recording = sample_path("recordings/vllm-0.22.1/preemption/0002.jsonl");
  for (const std::string command : {"conform", "audit", "replay", "same"}) {
    const std::string again = command == "same" ? " " + recording : "";
    const Outcome outcome =
        run_program("/bin/sh", {"-c", "cat " + recording + " | '" LOCKSTEP_COMMAND "' " + command +
                                          " /dev/stdin" + again});
    EXPECT_EQ(outcome.status, 2) << command;
    EXPECT_EQ(outcome.err,
              "lockstep: /dev/stdin: found a pipe or a device; expected a file, which is read more "
              "than once\n")
        << command;
  }
}

// A bundled file with one place changed.
struct Changed {
  const char* name;
  std::string command, file;
  const char *from, *to;
  const char* names;  // a word of the message
};

class ChangedFile : public testing::TestWithParam<Changed> {};

TEST_P(ChangedFile, IsRefusedWithTheCulpritNamed) {
  std::string text = read_text(GetParam().file);
  const std::size_t at = text.find(GetParam().from);
  ASSERT_NE(at, std::string::npos);
  text.replace(at, std::string_view(GetParam().from).size(), GetParam().to);
  const std::string path = fresh_path("changed.case.jsonl");
  write_text(path, text);
  const Outcome outcome = run_lockstep({GetParam().command, path});
  EXPECT_EQ(outcome.status, 2) << outcome.out;
  EXPECT_NE(outcome.err.find(GetParam().names), std::string::npos) << outcome.err;
}

const std::string kRegressions = LOCKSTEP_SOURCE_DIR "/tests/regressions/";

INSTANTIATE_TEST_SUITE_P(
    Each, ChangedFile,
    testing::Values(Changed{"AStateWithoutDimensions", "replay",
                            kRegressions + "eagle_beside_states_alone.case.jsonl",
                            R"("shapes":[[1,1]])", R"("shapes":[[]])", "shapes"},
                    Changed{"APartThatReceivedWhatTheWorkerDidNot", "conform",
                            LOCKSTEP_SOURCE_DIR
                            "/tests/conformance/newer_connectors/multi_0002.jsonl",
                            R"("worker":{"received":["r2"])", R"("worker":{"received":[])",
                            "parts_worker"},
                    Changed{"ATensorOfUnequalPages", "replay",
                            kRegressions + "rank_that_keeps_nothing_of_a_sent_block.case.jsonl",
                            R"("size":768)", R"("size":769)", "769 bytes"},
                    Changed{"ARecordingThatTheAuditDoesNotFollow", "audit",
                            sample_path("recordings/vllm-0.22.1/spec_decode_mamba/0016.jsonl"),
                            R"("block_size":16,)", R"("block_size":16,"async_scheduling":true,)",
                            "no recording was audited"}),
    [](const auto& changed) { return std::string(changed.param.name); });

TEST(Help, NamesTheCommandsAndEndsWithZero) {
  const Outcome outcome = run_lockstep({"--help"});
  EXPECT_EQ(outcome.status, 0);
  EXPECT_NE(outcome.out.find("replay"), std::string::npos);
  EXPECT_NE(outcome.out.find("conform"), std::string::npos);
  EXPECT_NE(outcome.out.find("Exit status"), std::string::npos);
}

TEST(Help, ShowsNoTypesOfAProgram) {
  for (const std::string command :
       {"replay", "pair", "conform", "layout", "capacity", "fit", "audit", "diff-engines",
        "mutants", "relations", "fuzz", "findings", "worker", "explain"}) {
    const Outcome outcome = run_lockstep({command, "--help"});
    EXPECT_EQ(outcome.status, 0) << command;
    for (const std::string type :
         {"INT", " in [", "FLOAT", ":{", "POSITIVE", "NONNEGATIVE", "{false}", LOCKSTEP_SOURCE_DIR})
      EXPECT_EQ(outcome.out.find(type), std::string::npos) << command << ": " << type;
  }
  const Outcome layout = run_lockstep({"layout", "--help"});
  EXPECT_NE(layout.out.find("--num-blocks N"), std::string::npos) << layout.out;
  const Outcome replay = run_lockstep({"replay", "--help"});
  EXPECT_NE(replay.out.find("--policy fcfs|priority"), std::string::npos) << replay.out;
  for (const char* text : {"running requests (the trace's hint, else 256)",
                           "tokens per step (the trace's hint, else 8192)", "\nKV connector:"})
    EXPECT_NE(replay.out.find(text), std::string::npos) << text << replay.out;
  const Outcome pair = run_lockstep({"pair", "--help"});
  EXPECT_NE(pair.out.find("engine profile to simulate (vllm-0.22.1)"), std::string::npos)
      << pair.out;
  const Outcome refused = run_lockstep({"layout", "--model", "llama-3.1-8b", "--num-blocks", "0"});
  EXPECT_NE(refused.err.find("not in range 1 to 2147483648"), std::string::npos) << refused.err;
}

TEST(Version, IsPrintedAndSaysWhereKernelsRun) {
  const Outcome outcome = run_lockstep({"--version"});
  EXPECT_EQ(outcome.status, 0);
  EXPECT_EQ(outcome.out.find("lockstep "), 0u);
  EXPECT_NE(outcome.out.find("CUDA"), std::string::npos);
}

TEST(BrokenTrace, IsRefusedWithFileLineAndField) {
  std::string text = read_text(kSample);
  const std::size_t second = text.find('\n') + 1;
  const std::size_t at = text.find("\"max_tokens\":", second);
  ASSERT_NE(at, std::string::npos);
  text.insert(at + 13, "-");
  const std::string path = temporary_path("broken.jsonl");
  write_text(path, text);
  const Outcome outcome = run_lockstep({"replay", path, "--backend", "none"});
  EXPECT_EQ(outcome.status, 2);
  EXPECT_NE(outcome.err.find(path + ":2"), std::string::npos) << outcome.err;
  EXPECT_NE(outcome.err.find("max_tokens"), std::string::npos) << outcome.err;
}

}  // namespace
}  // namespace lockstep::tests
