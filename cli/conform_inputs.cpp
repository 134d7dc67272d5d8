#include "cli/conform_inputs.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <set>

#include "base/json_reader.h"
#include "base/line_reader.h"
#include "cli/output/terminal.h"
#include "traces/importers/open_trace.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

// Adds a file to the list for its format; false: it is not a recording.
bool add(const std::string& path, FileFormat format, ConformInputs& inputs) {
  if (format == FileFormat::recording)
    inputs.schedules.push_back(path);
  else if (format == FileFormat::layouts)
    inputs.layouts.push_back(path);
  else
    return false;
  return true;
}

void add_file(const std::string& path, ConformInputs& inputs) {
  const Result<FileFormat> format = detect_format(path);
  if (!format)
    inputs.refused.push_back({path, format.error().message});
  else if (!add(path, *format, inputs))
    inputs.refused.push_back(
        {path, fmt::format("{}:1: found a {}; conform and audit take recordings", path,
                           name_of(*format))});
}

bool has_name_of_lines(const std::string& path) {
  return path.ends_with(".jsonl") || path.ends_with(".jsonl.gz");
}

// True for a file of JSON lines, by its name, whose first line is not a JSON object.
bool is_damaged(const std::string& path) {
  if (!has_name_of_lines(path)) return false;
  auto lines = LineReader::open(path);
  std::string_view line;
  if (!lines || !lines->next(line)) return true;
  JsonReader json(path);
  return !json.parse(line) || !json.root().is_object();
}

// `others`: files that are neither.
Result<void> add_folder(const std::string& folder, ConformInputs& inputs,
                        std::set<std::string>& others) {
  std::error_code error;
  // The order of a directory is the file system's; find_conform_inputs() sorts afterwards.
  fs::recursive_directory_iterator entries(folder, error);
  for (; !error && entries != fs::end(entries); entries.increment(error)) {
    const std::string path = entries->path().string();
    std::error_code unknown;
    const fs::file_status status = entries->status(unknown);
    if (fs::is_directory(status)) {
      inputs.others += entries->is_symlink() ? 1 : 0;  // not followed: links may form a cycle
      continue;
    }
    if (!fs::is_regular_file(status) && has_name_of_lines(path)) {
      inputs.refused.push_back({path, fmt::format("{}: found {}; expected a regular file", path,
                                                  fs::exists(status) ? "a pipe or a device"
                                                                     : "a link without a target")});
      continue;
    }
    const Result<FileFormat> format = detect_format(path);
    // A folder of recordings may hold anything else, but nothing that may be a damaged one.
    if (!format && is_damaged(path))
      inputs.refused.push_back({path, format.error().message});
    else if (!format || !add(path, *format, inputs))
      others.insert(path);
  }
  if (error) return fail("{}: {}", folder, error.message());
  return {};
}

// A file may be named twice, by itself and through its folder.
void sort_and_unite(std::vector<std::string>& paths) {
  std::sort(paths.begin(), paths.end());
  paths.erase(std::unique(paths.begin(), paths.end()), paths.end());
}

}  // namespace

Result<ConformInputs> find_conform_inputs(const std::vector<std::string>& paths) {
  ConformInputs inputs;
  std::vector<RefusedFile> empty;  // folders
  std::set<std::string> others;
  for (const std::string& path : paths) {
    std::error_code error;
    const bool folder = fs::is_directory(path, error);
    const std::size_t found = inputs.schedules.size() + inputs.layouts.size();
    if (!folder)
      add_file(path, inputs);
    else if (Result<void> added = add_folder(path, inputs, others); !added)
      inputs.refused.push_back({path, added.error().message});
    else if (inputs.schedules.size() + inputs.layouts.size() == found)
      empty.push_back({path, path + ": contains no recording"});
  }
  sort_and_unite(inputs.schedules);
  sort_and_unite(inputs.layouts);
  // A named file would be in one of the three lists, so only folders without a recording get here.
  if (inputs.schedules.empty() && inputs.layouts.empty() && inputs.refused.empty())
    return fail("{}", empty.front().reason);
  inputs.refused.insert(inputs.refused.end(), empty.begin(), empty.end());
  sort_and_unite(inputs.refused);
  inputs.others += std::ssize(others);
  return inputs;
}

void sort_and_unite(std::vector<RefusedFile>& refused) {
  std::ranges::stable_sort(refused, {}, &RefusedFile::file);
  const auto same = std::ranges::unique(refused, {}, &RefusedFile::file);
  refused.erase(same.begin(), same.end());
}

std::string refused_text(std::span<const RefusedFile> refused) {
  // A folder of thousands of files of an old format must not scroll the result away.
  constexpr std::size_t kShown = 20;
  if (refused.empty()) return {};
  std::string text =
      fmt::format("\nRefused: {}\n", counted(static_cast<std::int64_t>(refused.size()), "file"));
  for (const RefusedFile& file : refused.first(std::min(refused.size(), kShown)))
    text += fmt::format("  {}\n", file.reason);
  if (refused.size() > kShown)
    text +=
        fmt::format("  ... and {} more (--json FILE lists them all)\n", refused.size() - kShown);
  return text;
}

nlohmann::ordered_json refused_json(std::span<const RefusedFile> refused) {
  auto json = nlohmann::ordered_json::array();
  for (const RefusedFile& file : refused)
    json.push_back({{"file", file.file}, {"reason", file.reason}});
  return json;
}

void add_refused(std::span<const RefusedFile> refused, CommandReport& report) {
  for (const RefusedFile& file : refused)
    report.add({.name = file.file,
                .kind = ItemKind::refused,
                .check = "refused",
                .line = file.reason,
                .file = file.file});
}

int judged_exit_code(std::span<const RefusedFile> refused, std::int64_t num_judged,
                     bool any_found) {
  if (refused.empty()) return any_found ? kExitDisagreed : kExitAgreed;
  // No summary has listed the reasons.
  if (num_judged == 0) {
    for (const RefusedFile& file : refused) refuse(file.reason);
    return kExitRefused;
  }
  const auto num_refused = static_cast<std::int64_t>(refused.size());
  return refuse(fmt::format("{} of {} refused", with_commas(num_refused),
                            counted(num_refused + num_judged, "file")));
}

}  // namespace lockstep
