// Writes a command's result for machines and CI pages, in the same way for every command that
// judges: its JSON, a JUnit file, GitHub annotations, a summary in Markdown.
//
// Invariants
// (1) A command reports what it judged as items; every format shows the same of each of them.
// (2) An error that ends a command early (a refused file or option) is an item too, and the files
//     are still written.
// (3) A command that watches stop signals (base/stop_signal.h) and is interrupted writes the same
//     files. They have "interrupted": true in JSON, and the exit status is 128 + signal.
// (4) Texts may contain any bytes: each format escapes them, and bytes that are not UTF-8 are
//     replaced.
//
// Not here: text for a person, which each command prints itself.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
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
  failed,   // a divergence, a violation, a mismatch or a deadlock
  known,    // a known finding
  skipped,  // not judged, and the reason
  refused,  // an input or an option is wrong
};

// One thing that was judged: a file, a seed, a defect.
struct ReportedItem {
  std::string name;
  ItemKind kind = ItemKind::passed;
  std::string check = {};    // name of the failed check: "page_written", "audit.attention_read"
  std::string line = {};     // what is wrong, in one line that does not change between runs
  std::string details = {};  // the text on a terminal; empty: `line` is all
  std::string file = {};     // input file; empty: none
  std::string again = {};    // the command that repeats it
};

// Paths and words of the command line; empty: not wanted.
struct ReportOptions {
  std::string json_path;
  std::string junit_path;
  std::string summary_path;  // appended to: the steps of a CI job share one page
  std::string annotations;   // "github"
};

// Declares --json with the help `json_help`, --junit, --summary and --annotations, in `group` of
// the help unless that is empty.
void declare_reports(CLI::App& command, ReportOptions& options, const std::string& json_help,
                     const std::string& group = {});

// Collects the result of a command while it runs.
class CommandReport {
 public:
  bool wants_json() const { return wants_json_; }
  void set_json(std::string text) { json_ = std::move(text); }
  void add(ReportedItem item) { items_.push_back(std::move(item)); }
  // Adds the item of a whole run. A run that a stop signal ended has not passed: it is skipped.
  void add_run(ReportedItem item);

  std::span<const ReportedItem> items() const { return items_; }
  // Returns the command line that repeats this one, with a change.
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

// Runs a command, writes the files that the options name, and returns the exit status. Errors of
// `run` and a lost standard output become a refusal; other exceptions pass through.
int run_reported(const CLI::App& command, const ReportOptions& options,
                 const std::function<Result<int>(CommandReport&)>& run);

// Makes CLI11 call run_reported() when `command` is chosen; the exit status goes to `exit_code`.
// REQUIRES: `reports` and `exit_code` outlive the parsing.
void run_when_chosen(CLI::App& command, const ReportOptions& reports, int& exit_code,
                     std::function<Result<int>(CommandReport&)> run);
template <class Options, class Run>
void run_when_chosen(CLI::App& command, const std::shared_ptr<Options>& options, int& exit_code,
                     Run run) {
  run_when_chosen(command, options->reports, exit_code,
                  [options, run](CommandReport& report) { return run(*options, report); });
}

// Returns "page_written step 3 request r1: WHAT", without a step of -1 and an empty request, and
// with the first line of `what`. A message of the audit that already starts this way is returned
// unchanged.
std::string stable_line(std::string_view check, std::int64_t step, std::string_view request,
                        std::string_view what);

// The formats.

// The text of a JSON result, with a newline. Bytes that are not UTF-8, such as those of a file
// name, become U+FFFD.
std::string json_text(const nlohmann::ordered_json& json);
// A test case per item. Known findings and skipped items count as skipped; refused ones are errors.
std::string junit_text(std::string_view command, std::span<const ReportedItem> items,
                       double seconds);
// A workflow command per failed, refused or known item; after 50 of them a notice that there are
// more.
std::string github_annotations(std::string_view command, std::span<const ReportedItem> items);
// A headline, and a table of the failed, refused and known items, at most 50 rows.
std::string markdown_summary(std::string_view command, std::span<const ReportedItem> items);

}  // namespace lockstep
