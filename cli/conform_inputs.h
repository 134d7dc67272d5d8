// What `lockstep conform` is pointed at: recordings of schedules and of memory plans, found in
// files and folders by what they hold.
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
  std::vector<std::string> schedules;  // sorted, each once
  std::vector<std::string> layouts;    // likewise
  std::vector<RefusedFile> refused;    // paths that are named and are neither, or are not there
  std::int64_t others = 0;             // files in the folders that are neither
};

// An Error: folders alone are named, and there is nothing in them.
Result<ConformInputs> find_conform_inputs(const std::vector<std::string>& paths);

// What was refused, one line each, for a summary on the terminal; empty: nothing was.
std::string refused_text(std::span<const RefusedFile> refused);
// [{file, reason}]
nlohmann::ordered_json refused_json(std::span<const RefusedFile> refused);
// The files of a summary whose recordings are cut off, one line each; empty: all are whole.
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
// An item for each.
void add_refused(std::span<const RefusedFile> refused, CommandReport& report);
// The end of a command that judges many files: what was refused goes to stderr, in full where there
// is no summary that tells it (`num_judged` is 0), and outweighs what was found.
int judged_exit_code(std::span<const RefusedFile> refused, std::int64_t num_judged, bool any_found);

}  // namespace lockstep
