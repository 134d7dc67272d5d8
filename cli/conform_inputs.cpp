#include "cli/conform_inputs.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "traces/importers/open_trace.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

bool add(const std::string& path, FileFormat format, ConformInputs& inputs) {
  if (format == FileFormat::recording) {
    inputs.schedules.push_back(path);
  } else if (format == FileFormat::layouts) {
    inputs.layouts.push_back(path);
  } else {
    return false;
  }
  return true;
}

Result<void> add_file(const std::string& path, ConformInputs& inputs) {
  const Result<FileFormat> format = detect_format(path);
  if (!format) return tl::unexpected(format.error());
  if (add(path, *format, inputs)) return {};
  return fail(fmt::format("{}: a {}; conform takes recordings", path, name_of(*format)));
}

Result<void> add_folder(const std::string& folder, ConformInputs& inputs) {
  std::error_code error;
  fs::recursive_directory_iterator entries(folder, error);
  for (; !error && entries != fs::end(entries); entries.increment(error)) {
    if (!entries->is_regular_file()) continue;
    const std::string path = entries->path().string();
    const Result<FileFormat> format = detect_format(path);
    if (!format || !add(path, *format, inputs)) ++inputs.others;
  }
  if (error) return fail(fmt::format("{}: {}", folder, error.message()));
  return {};
}

void sort_and_unite(std::vector<std::string>& paths) {
  std::sort(paths.begin(), paths.end());
  paths.erase(std::unique(paths.begin(), paths.end()), paths.end());
}

}  // namespace

Result<ConformInputs> find_conform_inputs(const std::vector<std::string>& paths) {
  ConformInputs inputs;
  for (const std::string& path : paths) {
    std::error_code error;
    const bool folder = fs::is_directory(path, error);
    Result<void> added = folder ? add_folder(path, inputs) : add_file(path, inputs);
    if (!added) return tl::unexpected(added.error());
  }
  sort_and_unite(inputs.schedules);
  sort_and_unite(inputs.layouts);
  if (inputs.schedules.empty() && inputs.layouts.empty()) {
    return fail(fmt::format("{}: no recording there", paths.front()));
  }
  return inputs;
}

}  // namespace lockstep
