// Recordings that python made while vLLM's own engine loop served: with clients that disconnect
// while the model runs, several stop tokens, prompts as tokens, drafts that only the worker has,
// pauses, rare parameters, models with a server's defaults.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "properties/audit/audit.h"
#include "sim/conform/conform.h"
#include "tests/support/temporary_folder.h"
#include "traces/formats/recording.h"

namespace lockstep {
namespace {

std::vector<std::string> served_recordings() {
  std::vector<std::string> paths;
  const std::string folder = std::string(LOCKSTEP_SOURCE_DIR) + "/traces/samples/served";
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder))
    if (entry.path().extension() == ".jsonl") paths.push_back(entry.path().string());
  std::ranges::sort(paths);
  return paths;
}

std::string test_name(const ::testing::TestParamInfo<std::string>& info) {
  std::string name = info.param.substr(info.param.find("vllm-"));
  name.resize(name.size() - std::string(".jsonl").size());
  std::ranges::replace_if(
      name, [](char c) { return !std::isalnum(c); }, '_');
  return name;
}

class ServedRecording : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(All, ServedRecording, ::testing::ValuesIn(served_recordings()), test_name);

TEST_P(ServedRecording, AgreesWithTheReferenceInEveryField) {
  const auto file = conform_recording(GetParam());
  ASSERT_TRUE(file) << file.error().message;
  EXPECT_GT(file->steps, 0);
  ASSERT_FALSE(file->mismatch) << "step " << file->mismatch->step << ", " << file->mismatch->what
                               << ": recorded " << file->mismatch->recorded << ", model "
                               << file->mismatch->model;
}

TEST_P(ServedRecording, IsClean) {
  const auto file = audit_recording(GetParam());
  ASSERT_TRUE(file) << file.error().message;
  EXPECT_GT(file->reads_checked, 0);
  for (const AuditFinding& finding : file->findings)
    ADD_FAILURE() << "step " << finding.step << ", " << finding.request << ": " << finding.what;
}

// True if the recording still agrees when clients that disconnected while the model ran disconnect
// after its output.
bool agrees_when_clients_leave_later(const std::string& path) {
  auto recording = read_recording(path).value();
  const std::string changed_path = tests::temporary_path("leave_later.jsonl");
  for (std::size_t s = 0; s + 1 < recording.steps.size(); ++s) {
    auto& during = recording.steps[s].during;
    auto& before = recording.steps[s + 1].before;
    before.insert(before.begin(), during.begin(), during.end());
    during.clear();
  }
  auto writer = RecordingWriter::create(changed_path, recording.header).value();
  for (const RecordedStep& step : recording.steps) EXPECT_TRUE(writer.write(step));
  EXPECT_TRUE(writer.close(recording.end));
  return !conform_recording(changed_path).value().mismatch;
}

// It does not always show (a request may have had nothing to lose), but it is not the same.
TEST(ServedRecordings, LeavingDuringAStepIsNotLeavingBeforeTheNext) {
  const auto paths = served_recordings();
  EXPECT_LT(std::ranges::count_if(paths, agrees_when_clients_leave_later), paths.size());
}

// A reset that preempts, treated as one that does not: the output in flight would count.
TEST(ResetThatPreempts, DropsWhatIsInFlight) {
  const std::string path = std::string(LOCKSTEP_SOURCE_DIR) +
                           "/traces/samples/served/vllm-0.33.0/reset_running/0000.jsonl";
  Recording recording = read_recording(path).value();
  std::int64_t resets = 0;
  for (RecordedStep& step : recording.steps)
    for (RecordedEvent& event : step.during)
      if (std::exchange(event.resets_running, false)) ++resets;
  ASSERT_EQ(resets, 1);
  const std::string changed = tests::temporary_path("plain_reset.jsonl");
  auto writer = RecordingWriter::create(changed, recording.header);
  for (const RecordedStep& step : recording.steps) ASSERT_TRUE(writer->write(step));
  ASSERT_TRUE(writer->close(recording.end));
  EXPECT_TRUE(conform_recording(changed)->mismatch);
  const auto audited = audit_recording(changed);
  EXPECT_TRUE(std::ranges::any_of(audited->findings, [](const AuditFinding& finding) {
    return finding.what.find("which holds token 6 of request a") != std::string::npos;
  }));
}

// Recordings may note the output of a step that scheduled nothing; it decides nothing.
TEST(EmptySteps, HaveOutputsOrHaveNone) {
  const std::string path = std::string(LOCKSTEP_SOURCE_DIR) +
                           "/traces/samples/served/vllm-0.33.0/reset_running/0000.jsonl";
  Recording recording = read_recording(path).value();
  ASSERT_TRUE(recording.steps[6].scheduled.empty());
  ASSERT_FALSE(recording.steps[7].output_of_step);
  recording.steps[7].output_of_step = 6;
  const std::string changed = tests::temporary_path("empty_output.jsonl");
  auto writer = RecordingWriter::create(changed, recording.header);
  for (const RecordedStep& step : recording.steps) ASSERT_TRUE(writer->write(step));
  ASSERT_TRUE(writer->close(recording.end));
  const auto conformed = conform_recording(changed);
  ASSERT_TRUE(conformed) << conformed.error().message;
  EXPECT_FALSE(conformed->mismatch);
}

}  // namespace
}  // namespace lockstep
