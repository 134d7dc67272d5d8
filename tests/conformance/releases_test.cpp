// The releases between, one folder of small recordings each: the model decides as the release did
// in every field of every step, and not as the neighbouring release. All recordings of these
// releases are compared where $LOCKSTEP_DATA holds them.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <string>
#include <vector>

#include "reference/profiles/policies.h"
#include "reference/profiles/releases.h"
#include "sim/conform/conform.h"
#include "tests/conformance/recording_files.h"
#include "traces/models/model_file.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

const fs::path kBundled = fs::path(LOCKSTEP_SOURCE_DIR) / "tests/conformance/releases";

std::vector<std::string> bundled_releases() {
  std::vector<std::string> names;
  for (const auto& folder : fs::directory_iterator(kBundled))
    names.push_back(folder.path().filename());
  std::ranges::sort(names);
  return names;
}

std::string release_name(const testing::TestParamInfo<std::string>& release) {
  std::string name = release.param;
  std::ranges::replace_if(
      name, [](char c) { return c == '-' || c == '.'; }, '_');
  return name;
}

// The newest release before that decides otherwise, or else the oldest one behind.
std::string neighbour_of(const std::string& name) {
  const EngineProfile& own = engine_profile(name);
  const auto other = [&](const EngineProfile& profile) {
    return !differences(own, profile).empty();
  };
  const auto profiles = engine_profiles();
  const auto place = std::ranges::find(profiles, name, &EngineProfile::name);
  const auto before =
      std::find_if(std::reverse_iterator(place), std::reverse_iterator(profiles.begin()), other);
  if (before.base() != profiles.begin()) return before->name;
  const auto behind = std::find_if(place, profiles.end(), other);
  EXPECT_NE(behind, profiles.end()) << name;
  return behind->name;
}

class RecordedRelease : public testing::TestWithParam<std::string> {};

TEST_P(RecordedRelease, BundledSamplesAgreeInEveryField) {
  const auto paths = recordings_under(kBundled / GetParam());
  ASSERT_GE(paths.size(), 3u);
  expect_all_agree(paths);
}

TEST_P(RecordedRelease, BundledSamplesTellItFromTheReleaseBeside) {
  const std::string neighbour = neighbour_of(GetParam());
  const ConformSummary summary = conform_recordings(recordings_under(kBundled / GetParam()),
                                                    {.engine = neighbour, .jobs = conform_jobs()});
  EXPECT_TRUE(std::ranges::any_of(summary.files, [](const ConformFile& file) {
    return file.mismatch.has_value();
  })) << neighbour;
}

TEST_P(RecordedRelease, EveryRecordingAgreesInEveryField) {
  const auto data = find_data_dir();
  const fs::path root = data.value_or("") / "recordings_more" / GetParam();
  if (!data || !fs::is_directory(root)) GTEST_SKIP() << "no recordings: " << data_dir_hint();
  const auto paths = recordings_under(root);
  ASSERT_GE(paths.size(), 161u);
  expect_all_agree(paths);
}

INSTANTIATE_TEST_SUITE_P(All, RecordedRelease, testing::ValuesIn(bundled_releases()), release_name);

}  // namespace
}  // namespace lockstep
