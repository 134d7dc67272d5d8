// Beyond the recorded families: configurations that only their neighbours reach (draft models,
// windows of one token, groups of one spec, hybrids under decode context parallelism, retention,
// lookahead hashes), recorded from vLLM by the project's own recorder.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "sim/conform/conform.h"

namespace lockstep {
namespace {

TEST(Neighbours, agree_in_every_field) {
  const std::string folder = std::string(LOCKSTEP_SOURCE_DIR) + "/tests/conformance/neighbours";
  std::vector<std::string> paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    paths.push_back(entry.path().string());
  std::ranges::sort(paths);
  ASSERT_EQ(paths.size(), 15u);
  const ConformSummary summary = conform_recordings(paths, {.engine = {}, .jobs = 1});
  ASSERT_TRUE(summary.refused.empty()) << summary.refused[0].reason;
  for (const ConformFile& file : summary.files) {
    if (!file.mismatch) continue;
    ADD_FAILURE() << file.file << ", step " << file.mismatch->step << ": " << file.mismatch->what
                  << "\n  recorded " << file.mismatch->recorded << "\n  model    "
                  << file.mismatch->model;
  }
}

}  // namespace
}  // namespace lockstep
