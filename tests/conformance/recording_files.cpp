#include "tests/conformance/recording_files.h"

#include <algorithm>

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

}  // namespace lockstep
