#include "tests/conformance/recording_files.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <thread>

#include "sim/conform/conform.h"
#include "traces/importers/open_trace.h"

namespace lockstep {

std::vector<std::string> recordings_under(const std::filesystem::path& folder) {
  std::vector<std::string> paths;
  if (!std::filesystem::is_directory(folder)) return paths;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    if (!entry.is_regular_file()) continue;
    const auto format = detect_format(entry.path().string());
    if (format && *format == FileFormat::recording) paths.push_back(entry.path().string());
  }
  std::ranges::sort(paths);
  return paths;
}

int conform_jobs() { return static_cast<int>(std::max(1u, std::thread::hardware_concurrency())); }

void expect_all_agree(const std::vector<std::string>& paths) {
  const ConformSummary summary = conform_recordings(paths, {.engine = {}, .jobs = conform_jobs()});
  for (const RefusedFile& refused : summary.refused) ADD_FAILURE() << refused.reason;
  EXPECT_EQ(summary.files.size(), paths.size());
  for (const ConformFile& file : summary.files) {
    if (!file.mismatch) continue;
    ADD_FAILURE() << file.file << ", step " << file.mismatch->step << ": " << file.mismatch->what
                  << "\n  recorded " << file.mismatch->recorded << "\n  model    "
                  << file.mismatch->model;
  }
  EXPECT_EQ(summary.agreed, static_cast<std::int64_t>(paths.size()));
}

}  // namespace lockstep
