#include "cli/output/reports.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <csignal>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <system_error>

#include "base/check.h"
#include "base/child_process.h"
#include "base/json_writer.h"
#include "base/markup.h"
#include "base/output_file.h"
#include "base/stop_signal.h"
#include "base/stopwatch.h"
#include "cli/options/output_option.h"
#include "cli/output/terminal.h"

namespace lockstep {
namespace {

// Writes the JUnit file and appends to the summary. `seconds`: of the whole command.
Result<void> leave_files(const ReportOptions& options, std::string_view command,
                         std::span<const ReportedItem> items, double seconds) {
  if (!options.junit_path.empty())
    LS_RETURN_IF_ERROR(write_output(options.junit_path, junit_text(command, items, seconds)));
  if (!options.summary_path.empty())
    LS_RETURN_IF_ERROR(append_output(options.summary_path, markdown_summary(command, items)));
  return {};
}

}  // namespace

void declare_reports(CLI::App& command, ReportOptions& options, const std::string& json_help,
                     const std::string& group) {
  const auto in_group = [&](CLI::Option* option) {
    if (!group.empty()) option->group(group);
  };
  in_group(declare_output(command, "--json", options.json_path, json_help));
  in_group(declare_output(command, "--junit", options.junit_path, "the result as JUnit XML"));
  in_group(
      declare_output(command, "--summary", options.summary_path, "append the result as Markdown"));
  in_group(command
               .add_option("--annotations", options.annotations,
                           "github: annotate the workflow run with each failure")
               ->check(CLI::IsMember({"github"}))
               ->type_name("KIND"));
}

namespace {

// Runs the command and turns a failed print into an error: {fmt} throws std::system_error if
// standard output does not accept the text.
Result<int> run_printing(CommandReport& report,
                         const std::function<Result<int>(CommandReport&)>& run) {
  try {
    return run(report);
  } catch (const std::system_error& error) {
    return fail(text_of(error));
  }
}

// Adds the item and the JSON key of an interrupted command, and returns its exit status. The JSON
// is complete text already, so the key is inserted after the first brace.
int interrupt(CommandReport& report, std::string& json) {
  const int signal = stop_signal();
  const std::string line =
      fmt::format("interrupted by {}: the rest was not checked", signal_name(signal));
  fmt::print("\nI{}.\n", std::string_view(line).substr(1));
  report.add({.name = "interrupted", .kind = ItemKind::skipped, .line = line});
  // Every command's JSON is one object, which readers may extend by keys.
  LS_CHECK(json.empty() || json.starts_with('{'), "JSON of a command is an object");
  if (!json.empty())
    json.insert(1, json.starts_with("{}") ? "\"interrupted\": true" : "\"interrupted\": true,");
  return 128 + signal;
}

}  // namespace

void CommandReport::add_run(ReportedItem item) {
  if (stop_requested() && item.kind == ItemKind::passed) {
    item.kind = ItemKind::skipped;
    item.line = "interrupted";
  }
  add(std::move(item));
}

int run_reported(const CLI::App& command, const ReportOptions& options,
                 const std::function<Result<int>(CommandReport&)>& run) {
  Stopwatch clock;
  std::signal(SIGPIPE, SIG_IGN);  // a closed pipe must not end the command before its files
  CommandReport report(command);
  report.wants_json_ = !options.json_path.empty();
  const Result<int> ended = run_printing(report, run);
  const std::string& name = command.get_name();
  if (!ended)
    report.add({.name = fmt::format("lockstep {}", name),
                .kind = ItemKind::refused,
                .check = "refused",
                .line = ended.error().message});
  const int interrupted = stop_signal() != 0 ? interrupt(report, report.json_) : 0;
  Result<void> left;
  if (!report.json_.empty()) left = write_output(options.json_path, report.json_);
  if (left) left = leave_files(options, name, report.items_, clock.lap());
  const int status = exit_status(ended);
  // Annotations follow everything that the command has printed: GitHub reads them line by line.
  const auto printed = finish_standard_output();
  if (left && status != kExitRefused) left = printed;
  if (!options.annotations.empty()) fmt::print("{}", github_annotations(name, report.items_));
  if (!left) return refuse(left.error().message);
  return interrupted != 0 ? interrupted : status;
}

void run_when_chosen(CLI::App& command, const ReportOptions& reports, int& exit_code,
                     std::function<Result<int>(CommandReport&)> run) {
  command.callback([&command, &reports, &exit_code, run = std::move(run)] {
    exit_code = run_reported(command, reports, run);
  });
}

// The formats.

namespace {

// Limits of a page that people read; JSON and JUnit have all items.
constexpr std::size_t kAnnotationsMax = 50;
constexpr std::size_t kRowsMax = 50;

std::int64_t count_of(std::span<const ReportedItem> items, ItemKind kind) {
  return std::ranges::count(items, kind, &ReportedItem::kind);
}

// True for items that fail a command.
bool is_bad(const ReportedItem& item) {
  return item.kind == ItemKind::failed || item.kind == ItemKind::refused;
}

// Replaces control characters by '?': XML 1.0 does not allow them, not even escaped. Newline and
// tab stay.
std::string printable(std::string_view text) {
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 || c == '\n' || c == '\t')
      out += byte == 0x7F ? '?' : c;
    else
      out += '?';
  }
  return out;
}

// Replaces each byte that does not belong to a UTF-8 character by U+FFFD, and U+FFFE and U+FFFF,
// which XML does not allow.
std::string utf8(std::string_view text) {
  std::string out;
  const std::string clean = printable(text);
  for (std::size_t at = 0; at < clean.size();) {
    const std::size_t size = utf8_length(std::string_view(clean).substr(at));
    const std::string_view found = std::string_view(clean).substr(at, size);
    const bool is_allowed = size > 0 && found != "\xEF\xBF\xBE" && found != "\xEF\xBF\xBF";
    out += is_allowed ? found : "\xEF\xBF\xBD";
    at += std::max<std::size_t>(size, 1);
  }
  return out;
}

std::string xml(std::string_view text) { return escaped_for_markup(utf8(text)); }

// The details, or else the line, and the command that repeats the failure.
std::string body_of(const ReportedItem& item) {
  std::string text = item.details.empty() ? item.line : item.details;
  if (!text.empty() && text.back() != '\n') text += '\n';
  if (!item.again.empty()) text += fmt::format("Again: {}\n", item.again);
  return text;
}

std::string case_text(std::string_view command, const ReportedItem& item) {
  std::string text =
      fmt::format("    <testcase classname=\"lockstep.{}\" name=\"{}\"", command, xml(item.name));
  if (!item.file.empty()) text += fmt::format(" file=\"{}\"", xml(item.file));
  const auto child = [&](std::string_view element) {
    return fmt::format(">\n      <{0} type=\"{1}\" message=\"{2}\">{3}</{0}>\n    </testcase>\n",
                       element, xml(item.check), xml(item.line), xml(body_of(item)));
  };
  switch (item.kind) {
    case ItemKind::passed:
      return text + "/>\n";
    case ItemKind::failed:
      return text + child("failure");
    case ItemKind::refused:
      return text + child("error");
    case ItemKind::known:
    case ItemKind::skipped:
      break;
  }
  return text +
         fmt::format(">\n      <skipped message=\"{}\"/>\n    </testcase>\n", xml(item.line));
}

// Escapes text for a GitHub workflow command: '%' and newline end it, ':' and ',' end a property.
std::string for_workflow(std::string_view text, bool is_property) {
  std::string out;
  for (const char c : utf8(text)) {
    if (c == '%' || c == '\n' || (is_property && (c == ':' || c == ',')))
      out += fmt::format("%{:02X}", static_cast<unsigned>(c));
    else
      out += c;
  }
  return out;
}

// Escapes text for a cell of a Markdown table, in one line.
std::string cell(std::string_view text) {
  std::string out;
  for (const char c : escaped_for_markup(utf8(text))) {
    if (c == '|')
      out += "\\|";
    else
      out += c == '\n' ? ' ' : c;
  }
  return out;
}

// "lockstep conform: 2 of 7 items failed, 1 refused, 3 skipped". Without a failure it counts the
// items that agreed.
std::string headline(std::string_view command, std::span<const ReportedItem> items) {
  const std::int64_t failed = count_of(items, ItemKind::failed);
  const std::int64_t refused = count_of(items, ItemKind::refused);
  std::string text = fmt::format("lockstep {}: ", command);
  if (failed + refused == 0)
    text += items.empty()
                ? "nothing to check"
                : fmt::format("{} agreed", counted(count_of(items, ItemKind::passed), "item"));
  else if (failed > 0)
    text += fmt::format("{} of {} failed", failed, counted(std::ssize(items), "item"));
  if (refused > 0) text += fmt::format("{}{} refused", failed > 0 ? ", " : "", refused);
  for (const auto& [kind, name] :
       {std::pair{ItemKind::known, "of known findings"}, std::pair{ItemKind::skipped, "skipped"}})
    if (const std::int64_t count = count_of(items, kind); count > 0)
      text += fmt::format(", {} {}", count, name);
  return text;
}

}  // namespace

std::string stable_line(std::string_view check, std::int64_t step, std::string_view request,
                        std::string_view what) {
  std::string line(check);
  if (step >= 0) line += fmt::format(" step {}", step);
  if (!request.empty()) line += fmt::format(" request {}", request);
  line = on_one_line(line);
  // The audit's messages already start with this line.
  if (what.starts_with(line)) return on_one_line(what);
  return on_one_line(fmt::format("{}: {}", line, what.substr(0, what.find('\n'))));
}

std::string json_text(const nlohmann::ordered_json& json) {
  return json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

std::string junit_text(std::string_view command, std::span<const ReportedItem> items,
                       double seconds) {
  const std::string counts = fmt::format(
      "tests=\"{}\" failures=\"{}\" errors=\"{}\" skipped=\"{}\" time=\"{:.3f}\"", items.size(),
      count_of(items, ItemKind::failed), count_of(items, ItemKind::refused),
      count_of(items, ItemKind::known) + count_of(items, ItemKind::skipped), seconds);
  std::string text = fmt::format(
      "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuites {0}>\n"
      "  <testsuite name=\"lockstep {1}\" {0}>\n",
      counts, command);
  for (const ReportedItem& item : items) text += case_text(command, item);
  return text + "  </testsuite>\n</testsuites>\n";
}

std::string github_annotations(std::string_view command, std::span<const ReportedItem> items) {
  std::string text;
  std::size_t shown = 0;
  for (const ReportedItem& item : items) {
    // Annotations mark what needs attention.
    if (item.kind == ItemKind::passed || item.kind == ItemKind::skipped) continue;
    if (shown++ == kAnnotationsMax) {
      text += fmt::format("::notice title=lockstep {}::and more; --junit FILE has all\n", command);
      break;
    }
    text += item.kind == ItemKind::known ? "::notice " : "::error ";
    if (!item.file.empty()) text += fmt::format("file={},", for_workflow(item.file, true));
    text += fmt::format("title={}::{}",
                        for_workflow(fmt::format("lockstep {}: {}", command, item.name), true),
                        for_workflow(item.line, false));
    if (!item.again.empty()) text += for_workflow(fmt::format("\nAgain: {}", item.again), false);
    text += '\n';
  }
  return text;
}

std::string markdown_summary(std::string_view command, std::span<const ReportedItem> items) {
  std::string text = fmt::format("### {}\n\n", headline(command, items));
  const auto is_shown = [](const ReportedItem& item) {
    return is_bad(item) || item.kind == ItemKind::known;
  };
  const std::int64_t to_show = std::ranges::count_if(items, is_shown);
  if (to_show == 0) return text;
  text += "| what | finding | again |\n|---|---|---|\n";
  std::size_t rows = 0;
  for (const ReportedItem& item : items) {
    if (!is_shown(item)) continue;
    if (rows++ == kRowsMax) break;
    text += fmt::format("| {}{} | {} | {} |\n", cell(item.name),
                        item.kind == ItemKind::known ? " (known)" : "", cell(item.line),
                        item.again.empty() ? "" : fmt::format("<code>{}</code>", cell(item.again)));
  }
  if (to_show > static_cast<std::int64_t>(kRowsMax))
    text += fmt::format("\n... and {} more\n", to_show - static_cast<std::int64_t>(kRowsMax));
  return text + "\n";
}

}  // namespace lockstep
