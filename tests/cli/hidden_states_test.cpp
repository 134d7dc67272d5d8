// `replay --hidden-states DIR` from the outside: a file for each finished request, readable as
// safetensors, and what is refused.
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "tests/cli/command.h"
#include "traces/formats/safetensors.h"

namespace lockstep::tests {
namespace {

std::string model_with_hidden_states() {
  const std::string path = temporary_path("extracting.json");
  write_text(path, R"({"model_file": 1, "name": "extracting", "max_model_len": 4096,
    "layer_kinds": {"attn": {"kind": "full", "num_kv_heads": 1, "head_size": 16},
                    "hidden": {"kind": "hidden_state", "num_kv_heads": 1, "head_size": 24}},
    "layers": ["attn", "hidden"]})");
  return path;
}

std::vector<std::string> replay(std::vector<std::string> more) {
  std::vector<std::string> arguments = {
      "replay",       kSample, "--model",  model_with_hidden_states(), "--limit", "12",
      "--num-blocks", "400",   "--backend"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

TEST(HiddenStateFiles, EveryFinishedRequestLeavesOneThatOtherLibrariesCanRead) {
  const std::string folder = temporary_path("states"), path = temporary_path("states.json");
  std::filesystem::create_directory(folder);
  const Outcome outcome = run_lockstep(replay({"simt", "--hidden-states", folder, "--json", path}));
  ASSERT_EQ(outcome.status, 0) << outcome.out << outcome.err;
  const auto json = nlohmann::json::parse(read_text(path));
  const auto finished = json.at("finished_requests").get<std::int64_t>();
  EXPECT_GT(finished, 5);
  EXPECT_EQ(json.at("hidden_states").at("files"), finished);
  EXPECT_EQ(json.at("hidden_files_seen"), finished);
  std::int64_t num_rows = 0, num_files = 0, num_bytes = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    ++num_files;
    EXPECT_EQ(entry.path().extension(), ".safetensors");
    const std::string text = read_text(entry.path().string());
    num_bytes += std::ssize(text);
    const auto tensors =
        read_safetensors({reinterpret_cast<const std::uint8_t*>(text.data()), text.size()});
    ASSERT_TRUE(tensors) << entry.path() << ": " << tensors.error().message;
    ASSERT_EQ(tensors->size(), 2u);
    const auto& [rows, ids] = std::pair((*tensors)[0], (*tensors)[1]);
    EXPECT_EQ(rows.name, "layers.1.hidden");
    EXPECT_EQ(rows.dtype, "BF16");
    EXPECT_EQ(rows.shape, (std::vector<std::int64_t>{ids.shape[0], 1, 24}));
    EXPECT_EQ(ids.name, "content_ids");
    num_rows += ids.shape[0];
  }
  EXPECT_EQ(num_files, finished);
  EXPECT_EQ(json.at("hidden_states").at("bytes"), num_bytes);
  EXPECT_EQ(json.at("rows_extracted"), num_rows);
}

TEST(HiddenStateFiles, AreRefusedWhereThereWouldBeNoneInOneSentence) {
  const std::string folder = temporary_path("refused");
  std::filesystem::create_directory(folder);
  const auto refusal = [](const std::vector<std::string>& arguments) {
    const Outcome outcome = run_lockstep(arguments);
    EXPECT_EQ(outcome.status, 2) << outcome.out;
    return outcome.err;
  };
  EXPECT_NE(refusal(replay({"none", "--hidden-states", folder})).find("--backend none has none"),
            std::string::npos);
  EXPECT_NE(refusal(replay({"simt", "--hidden-states", folder + "/absent"})).find("no such folder"),
            std::string::npos);
  EXPECT_NE(refusal({"replay", kSample, "--limit", "3", "--backend", "simt", "--layers", "1",
                     "--hidden-states", folder})
                .find("the model has none"),
            std::string::npos);
  EXPECT_NE(refusal(replay({"simt", "--data-parallel-size", "2", "--hidden-states", folder}))
                .find("several ranks"),
            std::string::npos);
  EXPECT_NE(refusal(replay({"simt", "--hidden-states", "/proc"})).find("/proc/"),
            std::string::npos);
  EXPECT_NE(refusal({"pair", kSample, "--hidden-states", folder}).find("does not apply"),
            std::string::npos);
  EXPECT_TRUE(std::filesystem::is_empty(folder));
}

TEST(HiddenStateFiles, ThatShowBeforeTheyAreWholeAreFound) {
  const Outcome outcome = run_lockstep(replay({"simt", "--mutant", "hidden-save-race"}));
  EXPECT_EQ(outcome.status, 1) << outcome.out << outcome.err;
  EXPECT_NE(outcome.out.find("hidden_file"), std::string::npos) << outcome.out;
}

}  // namespace
}  // namespace lockstep::tests
