// fit finds the policies of an engine from its recordings: a release removed from the table is
// found again, and an engine that no combination describes is reported.
#include "sim/conform/fit.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "tests/conformance/recording_files.h"
#include "tests/support/temporary_folder.h"
#include "traces/models/model_file.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

// The recordings of a release: those with the seeds that all releases have.
std::vector<std::string> recordings_of(const fs::path& data, std::string_view release) {
  std::vector<std::string> paths;
  for (const char* root : {"recordings_more", "recordings"})
    for (const char* set : {"schedules", "schedules_stress", "schedules_retention"}) {
      const auto found = recordings_under(data / root / release / set);
      paths.insert(paths.end(), found.begin(), found.end());
    }
  constexpr std::size_t kEnough = 120;
  std::ranges::stable_sort(paths, {}, [](const std::string& path) {
    return fs::path(path).filename().string();  // seeds in their order, all families of each
  });
  if (paths.size() > kEnough) paths.resize(kEnough);
  return paths;
}

void expect_the_row_again(const Release& release) {
  const auto data = find_data_dir();
  const auto paths = data ? recordings_of(*data, release.name) : std::vector<std::string>();
  if (paths.empty()) GTEST_SKIP() << "no recordings: " << data_dir_hint();
  FitOptions options;
  options.left_out = {&release};
  options.jobs = conform_jobs();
  const auto fit = fit_policies(paths, options);
  ASSERT_TRUE(fit.has_value()) << fit.error().message;
  EXPECT_NE(fit->nearest, &release);
  ASSERT_TRUE(fit->agrees()) << fit->profile->name << "\n"
                             << fit->new_behaviour()->file << ", step "
                             << fit->new_behaviour()->step << ": " << fit->new_behaviour()->what;
  const EngineProfile& row = engine_profile(release.name);
  std::size_t num_determined = 0;
  for (const PolicyEvidence& each : fit->evidence) {
    num_determined += each.is_determined() ? 1 : 0;
    // The row's value is the one that was found, or one that no recording tells from it, or another
    // policy of the row explains as much.
    const std::int64_t value = each.policy->get(row);
    const auto is_of_row = [&](const PolicyFlip& flip) {
      return flip.policy->get(row) == flip.value;
    };
    EXPECT_TRUE(each.value == value || std::ranges::count(each.also, value) == 1 ||
                std::ranges::any_of(each.instead, is_of_row))
        << each.policy->name << ": " << each.policy->word(each.value) << ", and not "
        << each.policy->word(value);
  }
  EXPECT_GE(num_determined, 8u);
}

std::string name_of_release(const testing::TestParamInfo<const Release*>& info) {
  std::string name(info.param->name);
  std::ranges::replace_if(
      name, [](char c) { return c == '-' || c == '.'; }, '_');
  return name;
}

// Every third release, the first and the last among them, or the others.
std::vector<const Release*> every_third_release(bool others) {
  std::vector<const Release*> some;
  for (std::size_t i = 0; i < releases().size(); ++i)
    if ((i % 3 == 0 || i + 1 == releases().size()) != others) some.push_back(&releases()[i]);
  return some;
}

class FitRelease : public testing::TestWithParam<const Release*> {};
class FitReleaseSlow : public FitRelease {};

TEST_P(FitRelease, FindsTheRowAgainThatWasTakenOut) { expect_the_row_again(*GetParam()); }
TEST_P(FitReleaseSlow, FindsTheRowAgainThatWasTakenOut) { expect_the_row_again(*GetParam()); }

INSTANTIATE_TEST_SUITE_P(Releases, FitRelease, testing::ValuesIn(every_third_release(false)),
                         name_of_release);
INSTANTIATE_TEST_SUITE_P(Releases, FitReleaseSlow, testing::ValuesIn(every_third_release(true)),
                         name_of_release);

std::vector<std::string> sample_recordings(const char* release) {
  const auto samples = find_samples_dir();
  return recordings_under(samples.value_or("") / "recordings" / release);
}

TEST(Fit, OfTheSamplesNeedsNoSharedRecordings) {
  for (const char* name : {"vllm-0.22.1", "vllm-0.33.0"}) {
    const auto fit =
        fit_policies(sample_recordings(name), {.left_out = {}, .jobs = conform_jobs()});
    ASSERT_TRUE(fit.has_value()) << fit.error().message;
    EXPECT_TRUE(fit->agrees());
    EXPECT_TRUE(differences(*fit->profile, engine_profile(fit->nearest->name)).empty());
  }
}

// A number of free blocks that no policy gives: the release is found, and the step is named.
TEST(Fit, ADifferenceOfTheEndLineIsTheLatest) {
  Fit fit;
  for (const std::int64_t step : {-1, 5, 9})
    fit.summary.files.emplace_back().mismatch.emplace().step = step;
  EXPECT_EQ(fit.new_behaviour()->step, 5);
}

TEST(Fit, SaysWhereAnEngineDoesWhatTheTableDoesNotKnow) {
  const std::string original = sample_recordings("vllm-0.33.0").front();
  const auto recording = read_recording(original);
  ASSERT_TRUE(recording.has_value());
  const std::string changed = tests::temporary_path("changed.jsonl");
  constexpr std::int64_t kStep = 5;
  auto writer = RecordingWriter::create(changed, recording->header);
  ASSERT_TRUE(writer.has_value());
  for (RecordedStep step : recording->steps) {
    if (step.step == kStep) ++step.free_blocks;
    ASSERT_TRUE(writer->write(step).has_value());
  }
  ASSERT_TRUE(writer->close(recording->end).has_value());

  const auto fit = fit_policies({changed}, {.left_out = {}, .jobs = conform_jobs()});
  ASSERT_TRUE(fit.has_value()) << fit.error().message;
  EXPECT_FALSE(fit->agrees());
  ASSERT_NE(fit->new_behaviour(), nullptr);
  EXPECT_EQ(fit->new_behaviour()->step, kStep);
  EXPECT_EQ(fit->new_behaviour()->what, "free_blocks");
}

TEST(Fit, RefusesRecordingsOfTwoEnginesAndNoneAtAll) {
  auto paths = sample_recordings("vllm-0.22.1");
  paths.push_back(sample_recordings("vllm-0.33.0").front());
  const auto two = fit_policies(paths, {});
  ASSERT_FALSE(two.has_value());
  EXPECT_NE(two.error().message.find("one engine"), std::string::npos) << two.error().message;
  EXPECT_FALSE(fit_policies({}, {}).has_value());
}

}  // namespace
}  // namespace lockstep
