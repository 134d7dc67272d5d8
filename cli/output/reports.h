// A command's outputs for machines and CI pages, the same for every command that judges: its JSON,
// a JUnit file, annotations of GitHub, a summary in Markdown.
//
// Invariants
// (1) A command reports what it judged as items; every format shows the same of each of them.
// (2) What ends a command early (a refused file or option) is an item too, and the files are
//     written.
// (3) A command that a signal interrupted writes the same files. They have "interrupted": true in
//     JSON, and the exit code is 128 + signal.
// (4) Texts may hold anything: each format escapes them, and bytes that are not UTF-8 are replaced.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/result.h"
#include "cli/output/again.h"

namespace CLI {
class App;
}

namespace lockstep {

enum class ItemKind : std::uint8_t {
  passed,
  failed,   // a divergence, a violation, a mismatch, a deadlock
  known,    // a known finding
  skipped,  // not judged, and the reason
  refused,  // an input or an option is wrong
};

// One thing that was judged: a file, a seed, a defect.
struct ReportedItem {
  std::string name;
  ItemKind kind = ItemKind::passed;
  std::string check = {};    // that failed: "page_written", "audit.attention_read"
  std::string line = {};     // what is wrong, in one line that is the same every time
  std::string details = {};  // what a terminal shows of it
  std::string file = {};     // in which it is; empty: none
  std::string again = {};    // the command that repeats it
};

// As the command line gives them; empty: not asked for.
struct ReportOptions {
  std::string json_path;
  std::string junit_path;
  std::string summary_path;  // appended to, as pages of CI are
  std::string annotations;   // "github"
};

// Declares --json with `json_help`, and the others; in `group` unless that is empty.
void declare_reports(CLI::App& command, ReportOptions& options, const std::string& json_help,
                     const std::string& group = {});

// What a command has to say, while it runs.
class CommandReport {
 public:
  bool wants_json() const { return wants_json_; }
  void set_json(std::string text) { json_ = std::move(text); }
  void add(ReportedItem item) { items_.push_back(std::move(item)); }

  std::span<const ReportedItem> items() const { return items_; }
  // The command line that repeats this one, changed so.
  std::string again(const AgainChange& change = {}) const { return again_text(*command_, change); }
  std::string again_of_case(const std::string& name, const std::string& path) const {
    return lockstep::again_of_case(*command_, name, path);
  }

 private:
  friend int run_reported(const CLI::App&, const ReportOptions&,
                          const std::function<Result<int>(CommandReport&)>&);
  explicit CommandReport(const CLI::App& command) : command_(&command) {}

  const CLI::App* command_;
  std::vector<ReportedItem> items_;
  std::string json_;
  bool wants_json_ = false;
};

// Runs a command, writes the files that the options name, and returns the exit status.
int run_reported(const CLI::App& command, const ReportOptions& options,
                 const std::function<Result<int>(CommandReport&)>& run);

// Runs `run` so when `command` is chosen; its status in `exit_code`.
void run_when_chosen(CLI::App& command, const ReportOptions& reports, int& exit_code,
                     std::function<Result<int>(CommandReport&)> run);
template <class Options, class Run>
void run_when_chosen(CLI::App& command, const std::shared_ptr<Options>& options, int& exit_code,
                     Run run) {
  run_when_chosen(command, options->reports, exit_code,
                  [options, run](CommandReport& report) { return run(*options, report); });
}

// "page_written step 3 request r1: SENTENCE", without what is not known (-1, empty).
std::string stable_line(std::string_view check, std::int64_t step, std::string_view request,
                        std::string_view what);

// The formats.

std::string junit_text(std::string_view command, std::span<const ReportedItem> items,
                       double seconds);
std::string github_annotations(std::string_view command, std::span<const ReportedItem> items);
std::string markdown_summary(std::string_view command, std::span<const ReportedItem> items);

}  // namespace lockstep
