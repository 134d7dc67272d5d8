// `--kernels module:Class`: a user's Python class writes and attends on Lockstep's pages. Classes
// without any package are in tests/engines/plain_kernels.py; tests/engines/example_kernels_test.py
// runs those of docs/examples, which need torch.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "tests/cli/command.h"

namespace lockstep::tests {
namespace {

std::string plain(const std::string& name) {
  return LOCKSTEP_SOURCE_DIR "/tests/engines/plain_kernels.py:" + name;
}

Outcome replay_kernels(const std::string& kernels, std::vector<std::string> more = {}) {
  more.insert(more.begin(), {"replay", kSample, "--kernels", kernels});
  if (std::ranges::find(more, "--limit") == more.end()) more.insert(more.end(), {"--limit", "8"});
  return run_lockstep(more);
}

TEST(Kernels, OfAPythonClassAgreeInEveryLayoutAndHaveTheStateHashOfTheExecutor) {
  for (const std::vector<std::string>& cache :
       {std::vector<std::string>{},
        {"--engine", "vllm-0.22.1"},
        {"--engine", "vllm-0.22.1", "--layout", "HND", "--attention-backend", "flashinfer"},
        {"--block-size", "96", "--attention-backend", "flashinfer"},
        {"--head-size", "20", "--dtype", "fp8_e4m3"},
        {"--numbers", "real"}}) {
    std::vector<std::string> own = cache, simt = cache;
    const std::string path = temporary_path("kernels.json"), other = temporary_path("simt.json");
    own.insert(own.end(), {"--json", path});
    simt.insert(simt.begin(), {"replay", kSample, "--limit", "8", "--backend", "simt"});
    simt.insert(simt.end(), {"--json", other});
    const Outcome found = replay_kernels(plain("Sound"), own);
    ASSERT_EQ(found.status, 0) << found.err << found.out;
    EXPECT_NE(found.out.find("your kernels have no such function"), std::string::npos) << found.out;
    ASSERT_EQ(run_lockstep(simt).status, 0);
    const auto json = nlohmann::json::parse(read_text(path));
    EXPECT_GT(json.at("pages_checked").get<std::int64_t>(), 500);
    EXPECT_EQ(json.at("state_hash"), nlohmann::json::parse(read_text(other)).at("state_hash"));
  }
}

TEST(Kernels, OfLatentRowsAgreeAndWhatTheClassLacksIsListed) {
  const std::vector<std::string> latent = {"--attention", "mla", "--kv-heads", "1"};
  const Outcome found = replay_kernels(plain("Latent"), latent);
  EXPECT_EQ(found.status, 0) << found.err << found.out;
  EXPECT_EQ(found.out.find("write_latent by the executor's"), std::string::npos) << found.out;
  const Outcome other = replay_kernels(plain("Sound"), latent);
  EXPECT_EQ(other.status, 0) << other.err << other.out;
  EXPECT_NE(other.out.find("write_latent by the executor's own kernel: your kernels have no such"),
            std::string::npos)
      << other.out;
}

TEST(Kernels, MayDeclineLayersWhichTheReportLists) {
  const Outcome found = replay_kernels(plain("DeclinesAll"));
  EXPECT_EQ(found.status, 0) << found.err << found.out;
  for (const char* line : {"write by the executor's own kernel: the class declines the layer\n",
                           "your kernels: none of their functions was called\n"})
    EXPECT_NE(found.out.find(line), std::string::npos) << line << found.out;
  const Outcome quantised =
      replay_kernels(plain("Sound"), {"--numbers", "real", "--dtype", "fp8_e4m3"});
  EXPECT_EQ(quantised.status, 0) << quantised.err << quantised.out;
  EXPECT_NE(quantised.out.find("write by the executor's own kernel: rows to quantise\n"),
            std::string::npos)
      << quantised.out;
}

// Stages of a pipeline hold different layers, and may be declined one by one.
TEST(Kernels, MayDeclineTheLayersOfOneStageWhichTheReportNames) {
  const Outcome found = replay_kernels(plain("DeclinesTheSecond"),
                                       {"--layers", "2", "--pipeline-parallel-size", "2"});
  EXPECT_EQ(found.status, 0) << found.err << found.out;
  for (const char* line :
       {"pipeline stage 1: write by the executor's own kernel: the class declines the layer\n",
        "pipeline stage 1: your kernels: none of their functions was called\n",
        "- attend by the executor's own kernel: your kernels have no such function\n"})
    EXPECT_NE(found.out.find(line), std::string::npos) << line << found.out;
}

TEST(Kernels, ReceiveTheDtypeOfTheirLayers) {
  for (const auto& [dtype, name] : {std::pair{"fp8_e5m2", "fp8_e5m2\n"}, {"fp8_e4m3", "fp8\n"}}) {
    const Outcome found = replay_kernels(plain("DeclinesByDtype"), {"--dtype", dtype});
    EXPECT_NE(found.out.find(fmt::format("elements of {}", name)), std::string::npos) << found.out;
  }
}

// The executor's attention answers in the place of the class: model and backend make the same
// queries of 16 bits.
TEST(Kernels, MayTakeQueriesOfSixteenBits) {
  for (const char* name : {"QueriesOfBf16", "QueriesOfFp16"}) {
    const std::string path = temporary_path("queries.json");
    const Outcome found = replay_kernels(plain(name), {"--json", path});
    EXPECT_EQ(found.status, 0) << name << found.out << found.err;
    EXPECT_GT(nlohmann::json::parse(read_text(path)).at("outputs_checked").get<std::int64_t>(),
              1000);
  }
}

TEST(Kernels, MayMapSlotsByTheBlockTableOfTheirStep) {
  const std::vector<std::string> split = {"--block-size", "96", "--attention-backend",
                                          "flashinfer"};
  const Outcome found = replay_kernels(plain("MapsSlots"), split);
  EXPECT_EQ(found.status, 0) << found.out << found.err;
  EXPECT_EQ(found.out.find("map_slots"), std::string::npos) << found.out;
  const Outcome wrong = replay_kernels(plain("MapsSlotsOfSixteen"), split);
  EXPECT_EQ(wrong.status, 1) << wrong.out << wrong.err;
  EXPECT_NE(wrong.out.find(", slot_mapping"), std::string::npos) << wrong.out;
}

TEST(Kernels, ThatMapSlotsBehindThePoolAreFoundBeforeAnyWrite) {
  const Outcome found = replay_kernels(plain("MapsSlotsBehindThePool"));
  EXPECT_EQ(found.status, 1) << found.out << found.err;
  EXPECT_NE(found.out.find("r0's token 0): should be 16 but is 1099511627776"), std::string::npos)
      << found.out;
  const Outcome raised = replay_kernels(plain("RaisesInMapSlots"));
  EXPECT_EQ(raised.status, 1) << raised.out << raised.err;
  EXPECT_NE(raised.out.find("map_slots: ValueError: no slots"), std::string::npos) << raised.out;
}

// An extraction maps the slots of its hidden states by a table of one block per request.
TEST(Kernels, DoNotMapSlotsOfRings) {
  const Outcome found =
      run_lockstep({"fuzz", "--runs", "1", "--seed", "120", "--kernels", plain("MapsSlots")});
  EXPECT_EQ(found.status, 0) << found.out << found.err;
}

TEST(Kernels, WithABeginOfStepLoseWritesForTheReasonThatIsListed) {
  const Outcome shared = replay_kernels(
      plain("MapsSlots"), {"--kv-heads", "1", "--queries-per-kv", "4", "--tensor-parallel-size",
                           "2", "--decode-context-parallel-size", "2"});
  EXPECT_NE(shared.out.find("write by the executor's own kernel: slots that no block table gives"),
            std::string::npos)
      << shared.out;
  const Outcome idle = replay_kernels(plain("MapsSlots"), {"--data-parallel-size", "2"});
  EXPECT_NE(idle.out.find("write by the executor's own kernel: a step of padded tokens only"),
            std::string::npos)
      << idle.out;
  for (const Outcome& found : {shared, idle}) {
    EXPECT_EQ(found.status, 0) << found.out << found.err;
    EXPECT_EQ(found.out.find("draft model's pass"), std::string::npos) << found.out;
  }
}

TEST(Kernels, WriteHiddenStatesOfSeveralHeads) {
  const Outcome found =
      run_lockstep({"fuzz", "--runs", "1", "--seed", "58", "--kernels", plain("WholeRows")});
  EXPECT_EQ(found.status, 0) << found.out << found.err;
  EXPECT_EQ(found.out.find("none of their functions was called"), std::string::npos) << found.out;
}

TEST(Kernels, MayBeInAFileNamedAsAModuleOfPython) {
  const std::filesystem::path folder = fresh_path("kernels");
  std::filesystem::create_directories(folder);
  for (const char* name : {"types.py", "json.py", "kernels.v2.py"}) {
    std::filesystem::copy_file(LOCKSTEP_SOURCE_DIR "/tests/engines/plain_kernels.py",
                               folder / name);
    const Outcome found = replay_kernels((folder / name).string() + ":Sound", {"--limit", "1"});
    EXPECT_EQ(found.status, 0) << name << found.out << found.err;
    std::filesystem::remove(folder / name);
  }
}

TEST(Kernels, ThatAreWrongAreFoundInThePage) {
  const std::pair<const char*, const char*> kDefects[] = {
      {"SwapsParts", ", page_written"},
      {"HalvesBlocks", ", page_"},
      {"WritesBeyond", ", page_"},
      {"Raises", "ValueError: no kernel for layers.1"},
      {"Dies", "exit status 3"},
      {"Attends", "plain views have no results"},
      {"Asks", "EOFError"},
      {"RaisesNoUtf8", "no kernel for \\udcff"},
  };
  for (const auto& [name, check] : kDefects) {
    const Outcome found = replay_kernels(plain(name));
    EXPECT_EQ(found.status, 1) << name << found.out << found.err;
    EXPECT_NE(found.out.find(check), std::string::npos) << name << found.out;
  }
}

TEST(Kernels, ThatRaiseShowTheLineOfTheClass) {
  const Outcome found = replay_kernels(plain("Raises"));
  EXPECT_NE(found.out.find("write of layer 1: ValueError"), std::string::npos) << found.out;
  EXPECT_NE(found.out.find("plain_kernels.py\", line"), std::string::npos) << found.out;
}

TEST(Kernels, ThatFailAreSavedShrunkAndExplained) {
  const std::string folder = fresh_path("cases");
  const Outcome found = replay_kernels(plain("SwapsParts"), {"--save", folder, "--shrink"});
  ASSERT_EQ(found.status, 1) << found.out << found.err;
  const std::size_t written = found.out.find("Written: ") + 9;
  const std::string file = found.out.substr(written, found.out.find('\n', written) - written);
  const Outcome again = run_lockstep({"replay", file});
  EXPECT_EQ(again.status, 1) << again.err;
  EXPECT_NE(again.out.find("The case is reproduced."), std::string::npos) << again.out;
  const Outcome explained = run_lockstep({"explain", file});
  EXPECT_EQ(explained.status, 1) << explained.err;
  EXPECT_NE(explained.out.find("Here it fails"), std::string::npos) << explained.out;
  // Without the defect the case is not reproduced.
  const Outcome sound = run_lockstep({"replay", file, "--kernels", plain("Sound")});
  EXPECT_EQ(sound.status, 4) << sound.out << sound.err;
}

TEST(Kernels, OfAClassAreFuzzed) {
  const Outcome sound =
      run_lockstep({"fuzz", "--runs", "12", "--seed", "1", "--kernels", plain("Sound")});
  EXPECT_EQ(sound.status, 0) << sound.out << sound.err;
  EXPECT_NE(sound.out.find("your kernels have no such function: "), std::string::npos) << sound.out;
  const Outcome wrong = run_lockstep(
      {"fuzz", "--runs", "6", "--seed", "1", "--failures", "1", "--kernels", plain("SwapsParts")});
  EXPECT_EQ(wrong.status, 1) << wrong.out << wrong.err;
  EXPECT_NE(wrong.out.find("page_written"), std::string::npos) << wrong.out;
}

struct Refusal {
  const char* name;
  const char* says;
};
class RefusedKernels : public testing::TestWithParam<Refusal> {};

TEST_P(RefusedKernels, AreOneSentence) {
  const Outcome found = replay_kernels(plain(GetParam().name));
  EXPECT_EQ(found.status, 2) << found.out;
  EXPECT_NE(found.err.find(GetParam().says), std::string::npos) << found.err;
  EXPECT_EQ(std::ranges::count(found.err, '\n'), 1) << found.err;
}

// The case of seed 103 runs without a backend: it agrees whatever the class is.
TEST_P(RefusedKernels, AreRefusedByFuzzThoughSomeCasesNeedNoBackend) {
  const Outcome found =
      run_lockstep({"fuzz", "--seed", "102", "--runs", "3", "--kernels", plain(GetParam().name)});
  EXPECT_EQ(found.status, 2) << found.out;
  EXPECT_EQ(found.out.find("Verdict"), std::string::npos) << found.out;
}

INSTANTIATE_TEST_SUITE_P(
    Each, RefusedKernels,
    testing::Values(Refusal{"NotThere", "has no class NotThere"},
                    Refusal{"HasNone", "has none of the functions write, write_latent, attend"},
                    Refusal{"TakesTwo",
                            "write(self, key, value) does not take write(layer, key, value, "
                            "kv_cache, slot_mapping)"},
                    Refusal{"QueriesOfInt8", "query_dtype 'int8' is none of"},
                    Refusal{"DeclinesByNumber",
                            "declines returned 7; expected why, True, or nothing"},
                    Refusal{"DeclinesByException",
                            "declines of layers.0 raised AttributeError: 'Layer' object has no "
                            "attribute 'no_such_field' (" LOCKSTEP_SOURCE_DIR
                            "/tests/engines/plain_kernels.py:"},
                    Refusal{"DeclinesNothing", "declines(self) does not take declines(layer): "},
                    Refusal{"NeedsMore", "NeedsMore() raised TypeError: "},
                    Refusal{"OfNoFramework", "framework 'jax' is none of torch, numpy, plain"}),
    [](const auto& refusal) { return std::string(refusal.param.name); });

TEST(Kernels, AreRefusedOnOtherBackendsAndDevicesInOneSentence) {
  const std::pair<std::vector<std::string>, const char*> kRefusals[] = {
      {{"--backend", "cuda"},
       std::filesystem::exists("/dev/nvidiactl") ? "'plain' has no tensors on a GPU"
                                                 : "--kernels with --backend cuda: no GPU"},
      {{"--backend", "none"}, "runs on the pages of --backend simt"},
      {{"--check", "check"}, "--check: your own kernels run in mode fast"},
      {{"--streams", "2"}, "--streams, --graphs: your own kernels run one by one"},
      {{"--mutant", "slot-wrong-block-size"}, "planted in Lockstep's own kernels"}};
  for (const auto& [options, says] : kRefusals) {
    const Outcome found = replay_kernels(plain("Sound"), options);
    EXPECT_EQ(found.status, 2) << found.out;
    EXPECT_NE(found.err.find(says), std::string::npos) << found.err;
  }
  for (const auto& [named, says] :
       {std::pair{"nowhere:Class", "nowhere cannot be imported: ModuleNotFoundError"},
        std::pair{"nowhere.py:Class", "there is no file nowhere.py"},
        std::pair{"nowhere", "expected module:Class or file.py:Class"}}) {
    const Outcome found = replay_kernels(named);
    EXPECT_EQ(found.status, 2) << found.out;
    EXPECT_NE(found.err.find(says), std::string::npos) << found.err;
  }
}

}  // namespace
}  // namespace lockstep::tests
