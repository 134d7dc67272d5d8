// The model decides as vLLM did, in every field of every step: the bundled recordings, and all of
// $LOCKSTEP_DATA/recordings where that is present.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "sim/conform/conform.h"
#include "tests/conformance/recording_files.h"
#include "tests/support/temporary_folder.h"
#include "traces/models/model_file.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

struct Family {
  const char* engine;
  const char* name;
};

class Recorded : public testing::TestWithParam<Family> {};

TEST_P(Recorded, BundledSamplesAgreeInEveryField) {
  const auto samples = find_samples_dir();
  ASSERT_TRUE(samples.has_value());
  const auto [engine, family] = GetParam();
  const auto paths = recordings_under(*samples / "recordings" / engine / family);
  ASSERT_GE(paths.size(), 1u);
  expect_all_agree(paths);
}

// schedules/FAMILY (24) and schedules_stress/FAMILY (8).
TEST_P(Recorded, WholeFamilyAgreesInEveryField) {
  const auto data = find_data_dir();
  const auto [engine, family] = GetParam();
  const fs::path root = data.value_or("") / "recordings" / engine;
  if (!data || !fs::is_directory(root)) GTEST_SKIP() << "no recordings: " << data_dir_hint();
  std::vector<std::string> paths = recordings_under(root / "schedules" / family);
  const auto stress = recordings_under(root / "schedules_stress" / family);
  paths.insert(paths.end(), stress.begin(), stress.end());
  ASSERT_EQ(paths.size(), 32u);
  expect_all_agree(paths);
}

class RecordedWithConnector : public testing::TestWithParam<const char*> {};

TEST_P(RecordedWithConnector, BundledSamplesAgreeInEveryField) {
  const auto samples = find_samples_dir();
  ASSERT_TRUE(samples.has_value());
  const auto paths =
      recordings_under(*samples / "recordings" / "vllm-0.22.1" / "connectors" / GetParam());
  ASSERT_GE(paths.size(), 1u);
  expect_all_agree(paths);
}

TEST_P(RecordedWithConnector, WholeFamilyAgreesInEveryField) {
  const auto data = find_data_dir();
  const fs::path root = data.value_or("") / "recordings" / "vllm-0.22.1" / "connectors";
  if (!data || !fs::is_directory(root)) GTEST_SKIP() << "no recordings: " << data_dir_hint();
  const auto paths = recordings_under(root / GetParam());
  ASSERT_EQ(paths.size(), 24u);
  expect_all_agree(paths);
}

INSTANTIATE_TEST_SUITE_P(Family, RecordedWithConnector,
                         testing::Values("connector_async", "connector_delayed_free",
                                         "connector_failures_fail", "connector_failures_recompute",
                                         "connector_mixed_tight", "connector_sliding_window",
                                         "connector_sync"),
                         [](const auto& family) { return std::string(family.param); });

// Of vLLM's own loop, by python/tests/record_connectors.py.
TEST(RecordedServingWithConnector, AsynchronousSamplesAgreeInEveryField) {
  const auto samples = find_samples_dir();
  ASSERT_TRUE(samples.has_value());
  const auto paths = recordings_under(*samples / "recordings" / "vllm-0.22.1" / "connectors" /
                                      "connector_served_async");
  ASSERT_EQ(paths.size(), 6u);
  expect_all_agree(paths);
}

// Of vLLM's own loop with HiSparse's groups, by python/tests/record_hisparse.py.
TEST(RecordedHiSparse, HostResidentAndHotGroupsAgreeInEveryField) {
  const auto paths = recordings_under(fs::path(LOCKSTEP_SOURCE_DIR) / "tests/conformance/hisparse");
  ASSERT_EQ(paths.size(), 4u);
  expect_all_agree(paths);
}

// What vLLM 0.33.0 does as it is served, one small recording each: its own scheduler, driven by a
// script and recorded by python/lockstep_recorder.
class AsServed : public testing::TestWithParam<std::string> {};

TEST_P(AsServed, AgreesInEveryField) { expect_all_agree({GetParam()}); }

INSTANTIATE_TEST_SUITE_P(All, AsServed,
                         testing::ValuesIn(recordings_under(fs::path(LOCKSTEP_SOURCE_DIR) /
                                                            "tests/conformance/as_served")),
                         [](const auto& path) { return fs::path(path.param).stem().string(); });

// Models with the defaults of a server: schedules_served/FAMILY/SEED.jsonl.
TEST(RecordedAsServed, EveryFamilyAgreesInEveryField) {
  const auto data = find_data_dir();
  const fs::path root = data.value_or("") / "recordings_more" / "vllm-0.33.0" / "schedules_served";
  if (!data || !fs::is_directory(root)) GTEST_SKIP() << "no recordings: " << data_dir_hint();
  const auto paths = recordings_under(root);
  ASSERT_EQ(paths.size(), 272u);
  expect_all_agree(paths);
}

// Encoder-decoder models: items for the encoder, its budget and its rows that the engine counts.
TEST(RecordedBesideAnEncoder, EveryRecordingAgreesInEveryField) {
  const auto data = find_data_dir();
  for (const char* engine : {"vllm-0.22.1", "vllm-0.33.0"}) {
    const fs::path root = data.value_or("") / "recordings_more" / engine / "schedules_inputs";
    if (!data || !fs::is_directory(root)) GTEST_SKIP() << "no recordings: " << data_dir_hint();
    const auto paths = recordings_under(root / "encoder_decoder");
    ASSERT_EQ(paths.size(), 24u) << engine;
    expect_all_agree(paths);
  }
}

// The text of a small recording with `from` replaced by `to`.
std::string changed_copy(const std::string& from, const std::string& to) {
  std::ifstream in(LOCKSTEP_SOURCE_DIR "/tests/conformance/as_served/circular_buffer.jsonl");
  std::string text{std::istreambuf_iterator<char>(in), {}};
  const std::size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  text.replace(at, from.size(), to);
  const std::string path = tests::temporary_path("changed.jsonl");
  std::ofstream(path) << text;
  return path;
}

TEST(Conform, RefusesGroupsThatItDoesNotModelByName) {
  const std::string full = R"("type":"full")";
  for (const char* kind : {"cross_attention", "encoder_only"}) {
    const auto file =
        conform_recording(changed_copy(full, std::string(R"("type":")") + kind + R"(")"));
    ASSERT_FALSE(file) << kind;
    EXPECT_NE(file.error().message.find(kind), std::string::npos) << file.error().message;
  }
  const auto file = conform_recording(changed_copy(
      R"({"layers":["layers.0"])", R"({"role":"hisparse_source","layers":["layers.0"])"));
  ASSERT_FALSE(file);
  EXPECT_NE(file.error().message.find("hisparse_source"), std::string::npos);
}

constexpr const char* k0221[] = {"async_scheduling",
                                 "context_parallel",
                                 "different_block_sizes",
                                 "full_and_chunked_local",
                                 "full_and_sliding_window",
                                 "full_attention",
                                 "full_prefix_cache",
                                 "full_small_blocks",
                                 "hidden_state_group",
                                 "long_prefill_threshold",
                                 "mamba_align",
                                 "mamba_all",
                                 "mamba_none",
                                 "mamba_only",
                                 "mla",
                                 "no_chunked_prefill",
                                 "preemption",
                                 "priority",
                                 "sliding_window",
                                 "spec_decode_eagle",
                                 "spec_decode_eagle_sliding_window",
                                 "spec_decode_mamba",
                                 "spec_decode_ngram",
                                 "tiny_pool"};

// 0.33.0 refuses mamba_all; its recordings lack mamba_only.
std::vector<Family> families() {
  std::vector<Family> all;
  for (const char* name : k0221) all.push_back({"vllm-0.22.1", name});
  for (const char* name : k0221) {
    const std::string_view refused = name;
    if (refused != "mamba_all" && refused != "mamba_only") all.push_back({"vllm-0.33.0", name});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Family, Recorded, testing::ValuesIn(families()), [](const auto& family) {
  std::string name = std::string(family.param.engine) + "_" + family.param.name;
  std::replace_if(
      name.begin(), name.end(), [](char c) { return c == '-' || c == '.'; }, '_');
  return name;
});

}  // namespace
}  // namespace lockstep
