// A recording in which one number was changed is refused at exactly that step, with that field
// named: for every kind of field, in the first sample recording that has one.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>

#include "sim/conform/conform.h"
#include "tests/support/temporary_folder.h"
#include "traces/models/model_file.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

std::vector<std::string> sample_recordings() {
  std::vector<std::string> paths;
  const auto samples = find_samples_dir();
  for (const char* family : {"preemption", "full_prefix_cache", "full_attention"}) {
    const fs::path folder = samples.value_or("") / "recordings/vllm-0.22.1" / family;
    for (const auto& entry : fs::directory_iterator(folder)) paths.push_back(entry.path().string());
  }
  std::sort(paths.begin(), paths.end());
  paths.push_back(std::string(LOCKSTEP_SOURCE_DIR) +
                  "/tests/conformance/hisparse/hisparse_async/0054.jsonl");
  return paths;
}

std::vector<std::string> lines_of(const std::string& path) {
  std::vector<std::string> lines;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) lines.push_back(line);
  return lines;
}

// The last integer of `json` under `pattern`, whose "*" stands for any key or index.
Json* find_integer(Json& json, const std::vector<std::string>& pattern, std::size_t depth = 0) {
  if (depth == pattern.size()) return json.is_number_integer() ? &json : nullptr;
  if (pattern[depth] != "*") {
    return json.is_object() && json.contains(pattern[depth])
               ? find_integer(json[pattern[depth]], pattern, depth + 1)
               : nullptr;
  }
  Json* last = nullptr;
  if (json.is_structured()) {
    for (Json& child : json) {
      if (Json* found = find_integer(child, pattern, depth + 1)) last = found;
    }
  }
  return last;
}

struct Changed {
  std::string path;       // of the changed copy
  std::int64_t step = 0;  // -1: the header
};

// The copy has `delta` added to one number: in the last step that has such a field, so that
// everything before it agrees.
std::optional<Changed> change_one(const std::string& recording,
                                  const std::vector<std::string>& pattern, int delta, bool header) {
  std::vector<std::string> lines = lines_of(recording);
  const std::size_t first = header ? 0 : 1;
  const std::size_t last = header ? 1 : lines.size() - 1;
  for (std::size_t i = last; i-- > first;) {
    Json line = Json::parse(lines[i]);
    Json* number = find_integer(line, pattern);
    if (number == nullptr) continue;
    *number = number->get<std::int64_t>() + delta;
    lines[i] = line.dump();
    Changed changed{tests::temporary_path("changed.jsonl"),
                    header ? -1 : line.at("step").get<std::int64_t>()};
    std::ofstream file(changed.path);
    for (const std::string& text : lines) file << text << '\n';
    return changed;
  }
  return std::nullopt;
}

struct Field {
  const char* name;
  std::vector<std::string> pattern;
  const char* named;  // what the mismatch must speak of
  int delta = 1;
  bool header = false;
};

class ChangedRecording : public testing::TestWithParam<Field> {};

TEST_P(ChangedRecording, IsRefusedAtThatStepWithTheFieldNamed) {
  const Field& field = GetParam();
  for (const std::string& recording : sample_recordings()) {
    const auto changed = change_one(recording, field.pattern, field.delta, field.header);
    if (!changed) continue;
    const Result<ConformFile> sound = conform_recording(recording);
    ASSERT_TRUE(sound.has_value()) << sound.error().message;
    ASSERT_FALSE(sound->mismatch.has_value()) << recording << ": " << sound->mismatch->what;
    const Result<ConformFile> file = conform_recording(changed->path);
    ASSERT_TRUE(file.has_value()) << file.error().message;
    ASSERT_TRUE(file->mismatch.has_value()) << recording << ": the change went unseen";
    EXPECT_EQ(file->mismatch->step, changed->step) << recording;
    EXPECT_NE(file->mismatch->what.find(field.named), std::string::npos) << file->mismatch->what;
    EXPECT_NE(file->mismatch->recorded, file->mismatch->model);
    return;
  }
  FAIL() << "no sample recording has the field";
}

INSTANTIATE_TEST_SUITE_P(
    Each, ChangedRecording,
    testing::Values(
        Field{"ScheduledTokens", {"scheduled", "*", "tokens"}, "tokens"},
        Field{"ScheduledComputed", {"scheduled", "*", "computed"}, "computed"},
        Field{"ScheduledBlocks", {"scheduled", "*", "blocks", "*", "*"}, "blocks"},
        Field{"CommonPrefixBlocks", {"common_prefix_blocks", "*"}, "common_prefix_blocks"},
        Field{"FreeBlocks", {"free_blocks"}, "free_blocks", -1},
        Field{"Tables", {"tables", "*", "*", "*"}, "tables"}, Field{"Stored", {"stored"}, "stored"},
        Field{"Evicted", {"evicted"}, "evicted"},
        Field{"HostTransfers", {"hisparse", "transfers", "*", "*"}, "hisparse.transfers"},
        Field{"RowMirrors", {"hisparse", "mirrors", "*", "*", "*"}, "hisparse.mirrors"},
        Field{"ResidentPages", {"hisparse", "residency", "*", "*", "*", "*"}, "residency", -1},
        Field{"FreeHostBlocks", {"hisparse", "free_host_blocks"}, "free_host_blocks", -1},
        Field{"HashBlockSize", {"hash_block_size"}, "hash_block_size", 1, true}),
    [](const auto& field) { return std::string(field.param.name); });

}  // namespace
}  // namespace lockstep
