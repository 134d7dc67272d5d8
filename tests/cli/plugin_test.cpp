// `--backend FILE.so`: the example of docs/check_your_kernels.md agrees with the model, a bug in it
// is found where it is, and a wrong plugin is refused with one error message. The code in the guide
// is the code that runs here.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/cli/command.h"

namespace lockstep::tests {
namespace {

std::string plugin_path(const std::string& name) {
  return std::string(LOCKSTEP_BINARY_DIR) + "/plugins/" + name + ".so";
}

Outcome replay_with(const std::string& plugin, std::vector<std::string> more = {}) {
  more.insert(more.begin(), {"replay", kSample, "--limit", "40", "--backend", plugin_path(plugin)});
  return run_lockstep(more);
}

TEST(Plugin, OfPlainLoopsAgreesWithTheModelAndSaysWhatItDoesNotAnswer) {
  const std::string path = temporary_path("result.json");
  for (const std::vector<std::string>& cache :
       {std::vector<std::string>{"--json", path},
        {"--block-size", "96", "--attention-backend", "flashinfer", "--layout", "HND"},
        {"--attention", "mla", "--kv-heads", "1"}}) {
    const Outcome outcome = replay_with("plain_plugin", cache);
    EXPECT_EQ(outcome.status, 0) << outcome.err << outcome.out;
    EXPECT_NE(outcome.out.find("plugin plain loops"), std::string::npos) << outcome.out;
    EXPECT_NE(outcome.out.find("the plugin has no function attend"), std::string::npos);
  }
  const auto json = nlohmann::json::parse(read_text(path));
  EXPECT_GT(json.at("pages_checked").get<std::int64_t>(), 1000);
  EXPECT_GT(json.at("rows_read").get<std::int64_t>(), 1000);
  EXPECT_EQ(json.at("outputs_checked"), 0);
}

TEST(Plugin, WithSlotsOfTheWrongBlockSizeDivergesAtASlotAndTheCaseReproducesIt) {
  const std::string folder = fresh_path("cases");
  const std::vector<std::string> split = {"--block-size", "96",     "--attention-backend",
                                          "flashinfer",   "--save", folder};
  const Outcome outcome = replay_with("plain_plugin_bug", split);
  ASSERT_EQ(outcome.status, 1) << outcome.err << outcome.out;
  EXPECT_NE(outcome.out.find("slot"), std::string::npos) << outcome.out;
  const std::size_t saved = outcome.out.find("Saved: ") + 7;
  const std::string file = outcome.out.substr(saved, outcome.out.find('\n', saved) - saved);
  const Outcome again = run_lockstep({"replay", file});
  EXPECT_EQ(again.status, 1) << again.err;
  EXPECT_NE(again.out.find("The case is reproduced."), std::string::npos) << again.out;
  // Where blocks are not split for the kernel the bug is none.
  EXPECT_EQ(replay_with("plain_plugin_bug").status, 0);
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
                    Fault{"faulty_old_version", "speaks version 0"},
                    Fault{"faulty_other_size", "set struct_bytes"},
                    Fault{"faulty_no_write_rows", "no function write_rows"},
                    Fault{"faulty_half_of_states", "no function write_state"},
                    Fault{"faulty_no_copy_of_states", "no function copy_blocks"},
                    Fault{"faulty_refuses_plan", "refuses this plan: only 1 layers fit"},
                    Fault{"faulty_fails_later", "map_slots failed: the slots are on holiday"},
                    Fault{"faulty_fails_silently", "map_slots failed: (it does not say why)"}),
    [](const auto& fault) { return std::string(fault.param.plugin); });

TEST(Plugin, ThatIsNoSharedLibraryIsRefused) {
  const Outcome outcome = run_lockstep({"replay", kSample, "--backend", kSample});
  EXPECT_EQ(outcome.status, 2);
  EXPECT_NE(outcome.err.find("cannot be loaded"), std::string::npos) << outcome.err;
}

TEST(Plugin, WithoutStatesIsRefusedForAModelThatHasThem) {
  const Outcome outcome = replay_with("plain_plugin", {"--model", "qwen3.5-0.8b", "--num-blocks",
                                                       "24", "--no-prefill-checkpoints"});
  EXPECT_EQ(outcome.status, 2);
  EXPECT_NE(outcome.err.find("read_state"), std::string::npos) << outcome.err;
}

TEST(Plugin, IsNotWatchedAccessByAccess) {
  const Outcome outcome = replay_with("plain_plugin", {"--check", "hunt"});
  EXPECT_EQ(outcome.status, 2);
  EXPECT_NE(outcome.err.find("plugin"), std::string::npos) << outcome.err;
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
    EXPECT_NE(outcome.out.find("FlashInfer's AppendPagedKVCache"), std::string::npos);
  }
  const Outcome bug = replay_with("flashinfer_plugin_bug", {"--attention-backend", "flashinfer"});
  EXPECT_EQ(bug.status, 1) << bug.err;
  EXPECT_NE(bug.out.find("page_written"), std::string::npos) << bug.out;
  EXPECT_NE(bug.out.find("slot 16"), std::string::npos) << bug.out;
  // Where K and V of a block are not adjacent, pages are dense.
  EXPECT_EQ(replay_with("flashinfer_plugin_bug").status, 0);
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
  EXPECT_GE(blocks, 5);
}

}  // namespace
}  // namespace lockstep::tests
