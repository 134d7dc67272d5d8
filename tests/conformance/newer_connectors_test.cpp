// vLLM 0.33.0 with KV connectors: the model makes the same decision in every field of every step,
// and a profile that differs from it in one policy does not. A small part of the recordings is
// bundled; all are compared where $LOCKSTEP_DATA holds them.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "sim/conform/conform.h"
#include "tests/conformance/recording_files.h"
#include "traces/models/model_file.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

std::vector<std::string> bundled() {
  return recordings_under(fs::path(LOCKSTEP_SOURCE_DIR) / "tests/conformance/newer_connectors");
}

TEST(NewerConnectors, BundledSamplesAgreeInEveryField) {
  ASSERT_EQ(bundled().size(), 12u);
  expect_all_agree(bundled());
}

class NewerConnectorPolicy : public testing::TestWithParam<const char*> {};

TEST_P(NewerConnectorPolicy, IsToldByABundledSample) {
  const ConformSummary summary = conform_recordings(
      bundled(),
      {.engine = std::string("vllm-0.33.0,") + GetParam(), .jobs = conform_jobs(), .done = {}});
  EXPECT_TRUE(std::ranges::any_of(
      summary.files, [](const ConformFile& file) { return file.mismatch.has_value(); }));
}

INSTANTIATE_TEST_SUITE_P(All, NewerConnectorPolicy,
                         testing::Values("holders_come_first=no", "holders_stand_aside=yes",
                                         "loads_leave_room=no", "loads_leave_room=to_all",
                                         "draft_room=none", "draft_room=own_blocks",
                                         "waits_for_frees=no", "defers_frees=no",
                                         "asks_for_whole_blocks=no", "offers_divergent_hits=no",
                                         "zeroes_loads=yes", "takes_hits_of_all_groups_first=no"),
                         [](const auto& policy) {
                           std::string name = policy.param;
                           std::ranges::replace(name, '=', '_');
                           return name;
                         });

// Stores of SimpleCPUOffloadConnector hold blocks: those are refused by name.
TEST(NewerConnectors, EveryRecordingAgreesOrIsRefusedByName) {
  const auto data = find_data_dir();
  const fs::path root = data.value_or("") / "recordings_more" / "vllm-0.33.0" / "connectors";
  if (!data || !fs::is_directory(root)) GTEST_SKIP() << "no recordings: " << data_dir_hint();
  std::vector<std::string> paths = recordings_under(root);
  ASSERT_EQ(paths.size(), 968u);
  const auto refused = std::ranges::partition(paths, [](const std::string& path) {
    return path.find("/simple_offloading") == std::string::npos;
  });
  const std::vector<std::string> simple(refused.begin(), refused.end());
  paths.erase(refused.begin(), refused.end());
  ASSERT_EQ(simple.size(), 80u);
  expect_all_agree(paths);
  const ConformSummary summary =
      conform_recordings(simple, {.engine = {}, .jobs = conform_jobs(), .done = {}});
  EXPECT_EQ(summary.refused.size(), 80u);
  for (const RefusedFile& file : summary.refused)
    EXPECT_NE(file.reason.find("SimpleCPUOffloadConnector"), std::string::npos) << file.reason;
}

}  // namespace
}  // namespace lockstep
