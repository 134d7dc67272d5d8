// Finds recordings of schedules and of memory plans in files and folders, by their content and not
// by their names. Used by `conform`, `audit`, `fit` and `worker`, together with the texts about
// refused files that these commands share.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "cli/output/reports.h"

namespace lockstep {

struct ConformInputs {
  std::vector<std::string> schedules;  // sorted, without duplicates
  std::vector<std::string> layouts;    // the same for memory plans
  // Named paths that do not exist, files that are neither, folders without either, and files of a
  // folder that are named *.jsonl or *.jsonl.gz and are not regular files that begin with a JSON
  // object.
  std::vector<RefusedFile> refused;
  // Files in named folders that are neither, each once, and links to folders.
  std::int64_t others = 0;
};

// Searches folders recursively. A file that is named and is not a recording is refused; one of
// another format inside a folder is only counted. Errors: only folders are named, and they contain
// no recording. REQUIRES: at least one path.
Result<ConformInputs> find_conform_inputs(const std::vector<std::string>& paths);

// Sorts by file, each file once: an order that neither folders nor parts of a campaign decide.
void sort_and_unite(std::vector<RefusedFile>& refused);
// Returns the refused files for a summary on the terminal, one line each, at most 20; empty: none.
std::string refused_text(std::span<const RefusedFile> refused);
// [{file, reason}]
nlohmann::ordered_json refused_json(std::span<const RefusedFile> refused);
// Returns a line per file whose recording is cut off; empty: all are complete. A cut-off recording
// is compared up to its last complete step.
template <class Files>
std::string cut_off_lines(const Files& files) {
  std::string text;
  for (const auto& file : files)
    if (!file.cut_off.empty()) text += "  " + file.file + " is " + file.cut_off + "\n";
  return text;
}
// [{file, what}]
template <class Files>
nlohmann::ordered_json cut_off_json(const Files& files) {
  auto json = nlohmann::ordered_json::array();
  for (const auto& file : files)
    if (!file.cut_off.empty()) json.push_back({{"file", file.file}, {"what", file.cut_off}});
  return json;
}
// Adds an item per refused file.
void add_refused(std::span<const RefusedFile> refused, CommandReport& report);
// Returns the exit status of a command that checks many files, and prints the refusals to standard
// error: all of them if nothing was checked (`num_judged` is 0), otherwise their number, since the
// summary has listed them. A refusal outweighs a finding: a run that could not check everything
// must not look like a complete one.
int judged_exit_code(std::span<const RefusedFile> refused, std::int64_t num_judged, bool any_found);

}  // namespace lockstep
