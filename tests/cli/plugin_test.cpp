// `--backend FILE.so`: the example of docs/check_your_kernels.md agrees with the model, a bug in it
// is found where it is, and a wrong plugin is refused with one error message. The code in the guide
// is the code that runs here.
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "tests/cli/command.h"

namespace lockstep::tests {
namespace {

std::string plugin_path(const std::string& name) {
  return std::string(LOCKSTEP_BINARY_DIR) + "/plugins/" + name + ".so";
}

Outcome replay_with(const std::string& plugin, std::vector<std::string> more = {}) {
  more.insert(more.begin(), {"replay", kSample, "--limit", "8", "--backend", plugin_path(plugin)});
  return run_lockstep(more);
}

TEST(Plugin, OfPlainLoopsAgreesWithTheModelInEveryLayoutAndDtype) {
  const std::string path = temporary_path("result.json"), other = temporary_path("simt.json");
  for (const std::vector<std::string>& cache :
       {std::vector<std::string>{},
        {"--block-size", "96", "--attention-backend", "flashinfer", "--layout", "HND"},
        {"--engine", "vllm-0.22.1", "--dtype", "fp32"},
        {"--numbers", "real"},
        {"--dtype", "fp8_e4m3"}}) {
    std::vector<std::string> own = cache, simt = cache;
    own.insert(own.end(), {"--json", path});
    const Outcome outcome = replay_with("plain_plugin", own);
    EXPECT_EQ(outcome.status, 0) << outcome.err << outcome.out;
    EXPECT_NE(outcome.out.find("plain_plugin.so: your kernels, all else on"), std::string::npos)
        << outcome.out;
    EXPECT_EQ(outcome.out.find("no such function"), std::string::npos) << outcome.out;
    EXPECT_NE(outcome.out.find("query tokens, each counted per layer"), std::string::npos)
        << outcome.out;
    simt.insert(simt.begin(), {"replay", kSample, "--limit", "8", "--backend", "simt"});
    simt.insert(simt.end(), {"--json", other});
    ASSERT_EQ(run_lockstep(simt).status, 0);
    const auto json = nlohmann::json::parse(read_text(path));
    EXPECT_GT(json.at("pages_checked").get<std::int64_t>(), 500);
    EXPECT_GT(json.at("outputs_checked").get<std::int64_t>(), 1000);
    EXPECT_EQ(json.at("state_hash"), nlohmann::json::parse(read_text(other)).at("state_hash"));
  }
}

TEST(Plugin, LeavesWhatItHasNoFunctionForToTheExecutor) {
  const Outcome latent = replay_with("plain_plugin", {"--attention", "mla", "--kv-heads", "1"});
  EXPECT_EQ(latent.status, 0) << latent.err << latent.out;
  for (const char* function : {"attend_latent", "write_latent"})
    EXPECT_NE(latent.out.find(fmt::format("{} by the executor's own kernel", function)),
              std::string::npos)
        << latent.out;
}

// Rows of words and real numbers; quantised layers are declined and listed.
TEST(Plugin, IsFuzzed) {
  const Outcome sound = run_lockstep(
      {"fuzz", "--runs", "24", "--seed", "3", "--backend", plugin_path("plain_plugin")});
  EXPECT_EQ(sound.status, 0) << sound.out << sound.err;
  for (const char* declined : {"write by the executor's own kernel: rows to quantise: ",
                               "attend by the executor's own kernel: rows to quantise: "})
    EXPECT_NE(sound.out.find(declined), std::string::npos) << sound.out;
}

TEST(Plugin, WithSlotsOfTheWrongBlockSizeDivergesAtASlotAndTheCaseReproducesIt) {
  const std::string folder = fresh_path("cases");
  const std::vector<std::string> split = {"--block-size", "96",     "--attention-backend",
                                          "flashinfer",   "--save", folder};
  const Outcome outcome = replay_with("plain_plugin_bug", split);
  ASSERT_EQ(outcome.status, 1) << outcome.err << outcome.out;
  EXPECT_NE(outcome.out.find(", slot_mapping"), std::string::npos) << outcome.out;
  const std::size_t saved = outcome.out.find("Saved: ") + 7;
  const std::string file = outcome.out.substr(saved, outcome.out.find('\n', saved) - saved);
  const Outcome again = run_lockstep({"replay", file});
  EXPECT_EQ(again.status, 1) << again.err;
  EXPECT_NE(again.out.find("The case is reproduced."), std::string::npos) << again.out;
  // In a cache of blocks of 16 tokens the bug is none.
  EXPECT_EQ(replay_with("plain_plugin_bug", {"--block-size", "16"}).status, 0);
}

struct Fault {
  const char* plugin;
  const char* says;
};
class FaultyPlugin : public testing::TestWithParam<Fault> {};

TEST_P(FaultyPlugin, IsRefusedInOneSentence) {
  const Outcome outcome = replay_with(GetParam().plugin);
  EXPECT_EQ(outcome.status, 2) << outcome.out;
  EXPECT_NE(outcome.err.find(GetParam().says), std::string::npos) << outcome.err;
  EXPECT_NE(outcome.err.find(GetParam().plugin), std::string::npos) << outcome.err;
  EXPECT_EQ(outcome.out.find("Verdict"), std::string::npos) << outcome.out;
}

INSTANTIATE_TEST_SUITE_P(
    Each, FaultyPlugin,
    testing::Values(Fault{"not_there", "there is no such file"},
                    Fault{"faulty_no_entry", "exports no lockstep_plugin_open"},
                    Fault{"faulty_old_version", "speaks version 1 of the plugin interface"},
                    Fault{"faulty_other_size", "set struct_bytes"},
                    Fault{"faulty_no_function", "the plugin has no function; give it write"},
                    Fault{"throwing_in_open", "lockstep_plugin_open: it threw no device"},
                    Fault{"faulty_wrong_queries", "query_dtype 'int8' is not bf16, fp16 or fp32"},
                    Fault{"faulty_refuses_layers", "refuses these layers: only 1 of"}),
    [](const auto& fault) { return std::string(fault.param.plugin); });

// The case of seed 103 runs without a backend: it agrees whatever the plugin is.
Outcome fuzz_with(const std::string& plugin) {
  return run_lockstep({"fuzz", "--seed", "102", "--runs", "3", "--backend", plugin_path(plugin)});
}

TEST_P(FaultyPlugin, IsRefusedByFuzzThoughSomeCasesNeedNoBackend) {
  const Outcome outcome = fuzz_with(GetParam().plugin);
  EXPECT_EQ(outcome.status, 2) << outcome.out;
  EXPECT_NE(outcome.err.find(GetParam().says), std::string::npos) << outcome.err;
  EXPECT_EQ(outcome.out.find("Verdict"), std::string::npos) << outcome.out;
}

TEST(Plugin, OnAGpuNeedsOneInFuzzToo) {
  if (std::filesystem::exists("/dev/nvidiactl")) GTEST_SKIP() << "a GPU is here";
  const Outcome outcome = fuzz_with("faulty_on_gpu");
  EXPECT_EQ(outcome.status, 2) << outcome.out;
  EXPECT_NE(outcome.err.find("its kernels run on a GPU; no GPU"), std::string::npos) << outcome.err;
}

TEST(Plugin, IsNotCheckedByACaseWithoutABackendWhichTheReportLists) {
  const std::string path = temporary_path("fuzz.json");
  const Outcome outcome = run_lockstep({"fuzz", "--seed", "102", "--runs", "3", "--backend",
                                        plugin_path("plain_plugin"), "--json", path});
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  const char* says = "memory of 1 case that ran without the backend, first with seed 103";
  EXPECT_NE(outcome.out.find(says), std::string::npos) << outcome.out;
  const auto json = nlohmann::json::parse(read_text(path));
  EXPECT_EQ(json.at("without_backend"), nlohmann::json({103}));
  const std::string merged = temporary_path("merged.json");
  EXPECT_EQ(run_lockstep({"fuzz", "--merge", path, "--json", merged}).status, 0);
  EXPECT_EQ(read_text(merged), read_text(path));
}

TEST(Plugin, ThatIsNoSharedLibraryIsRefused) {
  const Outcome outcome = run_lockstep({"replay", kSample, "--backend", kSample});
  EXPECT_EQ(outcome.status, 2);
  EXPECT_NE(outcome.err.find("cannot be loaded"), std::string::npos) << outcome.err;
}

TEST(Plugin, ThatFailsInARunIsAFindingWithItsReason) {
  for (const auto& [plugin, says] :
       {std::pair{"faulty_fails_later", "write of layer 0: it returned 7: the rows are on holiday"},
        std::pair{"faulty_fails_silently", "it returned 7: (it does not say why)"},
        std::pair{"faulty_changes_table", "attend of layer 0: it changed the block table"},
        std::pair{"throwing_plugin", "exception: write of layer 0: it threw row "},
        std::pair{"number_throwing_plugin", "it threw another type than std::exception"}}) {
    const Outcome outcome = replay_with(plugin);
    EXPECT_EQ(outcome.status, 1) << outcome.out;
    EXPECT_NE(outcome.out.find(", memory_check"), std::string::npos) << outcome.out;
    EXPECT_NE(outcome.out.find(says), std::string::npos) << outcome.out;
  }
}

TEST(Plugin, ThatCallsExitDoesNotPass) {
  for (const std::vector<std::string>& command :
       {std::vector<std::string>{"replay", kSample}, {"fuzz", "--runs", "24", "--seed", "3"}}) {
    std::vector<std::string> arguments = command;
    arguments.insert(arguments.end(), {"--backend", plugin_path("exiting_plugin")});
    const Outcome outcome = run_lockstep(arguments);
    EXPECT_EQ(outcome.status, 1) << outcome.out;
    EXPECT_NE(outcome.err.find("a function of the plugin ended the process (exit): no verdict"),
              std::string::npos)
        << outcome.err;
  }
}

TEST(Plugin, MayDeclineALayerWithoutAReason) {
  const Outcome outcome = replay_with("faulty_declines_silently");
  EXPECT_EQ(outcome.status, 0) << outcome.out;
  EXPECT_NE(outcome.out.find("write by the executor's own kernel: the plugin declines the layer"),
            std::string::npos)
      << outcome.out;
}

TEST(Plugin, MayBeNamedByKernels) {
  const Outcome named =
      run_lockstep({"replay", kSample, "--limit", "4", "--kernels", plugin_path("plain_plugin")});
  EXPECT_EQ(named.status, 0) << named.err << named.out;
}

TEST(Plugin, IsNotWatchedAccessByAccess) {
  const Outcome outcome = replay_with("plain_plugin", {"--check", "hunt"});
  EXPECT_EQ(outcome.status, 2);
  EXPECT_NE(outcome.err.find("your own kernels run in mode fast"), std::string::npos)
      << outcome.err;
}

// Kernels that a package publishes as headers, which are compiled as they are.
TEST(Plugin, OfFlashInfersAppendAgreesAndAWrongStrideIsFoundInThePage) {
  if (const std::string missing = FLASHINFER_PLUGIN_MISSING; !missing.empty())
    GTEST_SKIP() << missing;
  for (const std::vector<std::string>& cache :
       {std::vector<std::string>{},
        {"--block-size", "96", "--attention-backend", "flashinfer", "--layout", "HND"},
        {"--dtype", "fp8_e4m3", "--kv-heads", "3", "--head-size", "128"},
        {"--dtype", "fp32", "--attention-backend", "flashinfer"}}) {
    const Outcome outcome = replay_with("flashinfer_plugin", cache);
    EXPECT_EQ(outcome.status, 0) << outcome.err << outcome.out;
    EXPECT_EQ(outcome.out.find("write: your kernels have"), std::string::npos) << outcome.out;
  }
  const Outcome bug = replay_with("flashinfer_plugin_bug", {"--attention-backend", "flashinfer"});
  EXPECT_EQ(bug.status, 1) << bug.err;
  EXPECT_NE(bug.out.find("page_written"), std::string::npos) << bug.out;
  EXPECT_NE(bug.out.find("slot 16"), std::string::npos) << bug.out;
  // Where K and V of a block are not adjacent, pages are dense.
  EXPECT_EQ(replay_with("flashinfer_plugin_bug", {"--engine", "vllm-0.22.1"}).status, 0);
  const Outcome narrow = replay_with("flashinfer_plugin", {"--head-size", "20"});
  EXPECT_EQ(narrow.status, 2) << narrow.out;
  EXPECT_NE(narrow.err.find("heads of 64, 128, 256 or 512"), std::string::npos) << narrow.err;
}

// Every block of C++ in the guide is in the example, line by line: it compiles and runs.
TEST(Guide, ShowsTheCodeOfTheExample) {
  const std::string root = LOCKSTEP_SOURCE_DIR;
  const std::string guide = read_text(root + "/docs/check_your_kernels.md");
  const std::string example = read_text(root + "/docs/examples/plain_plugin.cpp");
  constexpr std::string_view kBegin = "```cpp\n";
  int blocks = 0;
  for (std::size_t at = guide.find(kBegin); at != guide.npos; at = guide.find(kBegin, at + 1)) {
    const std::size_t begin = at + kBegin.size();
    const std::string block = guide.substr(begin, guide.find("```", begin) - begin);
    EXPECT_NE(example.find(block), std::string::npos) << "not in the example:\n" << block;
    ++blocks;
  }
  EXPECT_GE(blocks, 2);
}

}  // namespace
}  // namespace lockstep::tests
