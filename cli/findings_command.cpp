// lockstep findings [N...] --engine ENGINE...: which known findings does an engine still show?
//
// Runs the smallest known case of each finding of docs/findings.md on each engine
// (properties/findings/finding_cases.h), and prints a table of verdicts. --merge joins tables that
// other machines wrote as JSON. --markdown prints docs/reference/findings_by_release.md.
//
// Not checked: findings in a worker or kernel, which no decision shows.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/data_root.h"
#include "base/json_reader.h"
#include "base/line_reader.h"
#include "base/output_file.h"
#include "base/stop_signal.h"
#include "cli/commands.h"
#include "cli/options/decisions_option.h"
#include "cli/options/output_option.h"
#include "cli/output/reports.h"
#include "cli/output/terminal.h"
#include "properties/explain/explain_text.h"
#include "properties/findings/finding_cases.h"
#include "traces/formats/recording.h"

namespace lockstep {
namespace {

struct FindingsOptions {
  std::vector<int> numbers;  // empty: all findings
  std::vector<std::string> engines;
  std::int64_t timeout_s = 30;  // of an engine's reply
  std::string folder = (data_root() / "tests/regressions").string();
  ReportOptions reports;
  std::string save_dir;
  std::vector<std::string> merge;  // tables to join instead of running engines
  bool as_markdown = false;
};

// The verdicts of one engine.
struct Column {
  std::string engine;                // "vllm-0.22.1"
  std::vector<FindingTrial> trials;  // one per finding of the table, in its order
};

// Rows are findings, columns are engines.
struct Table {
  std::vector<const FindingCases*> findings;
  std::vector<Column> columns;
};

// Returns the chosen findings in the order of docs/findings.md, whatever the order on the command
// line. Errors: a number without cases.
Result<std::vector<const FindingCases*>> chosen_findings(const std::vector<int>& numbers) {
  std::vector<const FindingCases*> chosen;
  for (const FindingCases& finding : finding_cases())
    if (numbers.empty() || std::ranges::find(numbers, finding.number) != numbers.end())
      chosen.push_back(&finding);
  std::vector<int> known;
  for (const FindingCases& finding : finding_cases()) known.push_back(finding.number);
  for (const int number : numbers)
    if (std::ranges::find(known, number) == known.end())
      return fail("no case tests an engine for finding {}; these findings have cases: {}", number,
                  fmt::join(known, ", "));
  return chosen;
}

// Writes what an engine decided as ENGINE.finding-N.jsonl, which repeats the trial without the
// engine. No effect without --save, or if the engine decided no step.
Result<void> save_trial(const std::string& folder, const RecordedEngine& engine,
                        const FindingCases& finding, const FindingTrial& trial) {
  if (folder.empty() || trial.recording.steps.empty()) return {};
  LS_RETURN_IF_ERROR(make_output_folder(folder));
  RecordingHeader header = trial.recording.header;
  header.engine = engine;
  header.family = fmt::format("finding-{}", finding.number);
  const std::string name = fmt::format("{}.{}.jsonl", engine.text(), header.family);
  LS_ASSIGN_OR_RETURN(
      auto file, RecordingWriter::create((std::filesystem::path(folder) / name).string(), header));
  for (const RecordedStep& step : trial.recording.steps) LS_RETURN_IF_ERROR(file.write(step));
  return file.close(trial.recording.end);
}

// Leaves what was tried before a stop signal: the engines with every finding, or the findings of
// the first engine.
void keep_tried(Table& table) {
  const std::size_t num_tried = table.columns.back().trials.size();
  if (num_tried == table.findings.size()) return;
  if (table.columns.size() > 1)
    table.columns.pop_back();
  else
    table.findings.resize(num_tried);
}

// Tries every finding on every engine, one engine at a time: each is a process with a large import.
Result<Table> try_all(const FindingsOptions& options) {
  Table table;
  LS_ASSIGN_OR_RETURN(table.findings, chosen_findings(options.numbers));
  const auto total = std::ssize(options.engines) * std::ssize(table.findings);
  Progress progress("findings", total);
  std::int64_t done = 0;
  for (const std::string& engine : options.engines) {
    progress.at(done, fmt::format("starting {}", engine));
    // Destroyed at the end of each round, which ends the process before the next engine starts.
    LS_ASSIGN_OR_RETURN(const auto engines, open_decisions({.decisions = engine,
                                                            .timeout_s = options.timeout_s,
                                                            .option = "--engine"}));
    Column& column = table.columns.emplace_back();
    column.engine = engines->hello().engine.text();
    for (const FindingCases* finding : table.findings) {
      if (stop_requested()) break;
      LS_ASSIGN_OR_RETURN(auto trial, try_finding(*finding, {.folder = options.folder,
                                                             .engine = profile_of(*engines),
                                                             .decisions = decisions_of(engines),
                                                             .scope = scope_of(*engines)}));
      LS_RETURN_IF_ERROR(save_trial(options.save_dir, engines->hello().engine, *finding, trial));
      column.trials.push_back(std::move(trial));
      progress.at(++done, column.engine);
    }
    if (stop_requested()) break;
  }
  keep_tried(table);
  return table;
}

// The character of a verdict in a table with several engines.
std::string_view cell_of(FindingVerdict verdict) {
  switch (verdict) {
    case FindingVerdict::absent:
      return "";
    case FindingVerdict::shows:
      return "x";
    case FindingVerdict::stops:
      return "!";
    case FindingVerdict::other:
      return "?";
    case FindingVerdict::unbuilt:
      return "-";
  }
  return "";
}

// "0.22.1" of "vllm-0.22.1".
std::string version_of(const std::string& engine) { return engine.substr(engine.rfind('-') + 1); }

// One engine: a list with the verdict in words. Several: a table of characters with a legend.
std::string text_of(const Table& table) {
  std::string text;
  if (table.columns.size() == 1) {
    const Column& column = table.columns.front();
    text += fmt::format("{}\n", column.engine);
    for (std::size_t i = 0; i < table.findings.size(); ++i)
      text += fmt::format("  {:>2}  {:<8} {}\n", table.findings[i]->number,
                          name_of(column.trials[i].verdict), table.findings[i]->title);
  } else {
    text += "    ";
    for (const Column& column : table.columns)
      text += fmt::format(" {:>7}", version_of(column.engine));
    text += "\n";
    for (std::size_t i = 0; i < table.findings.size(); ++i) {
      text += fmt::format("  {:>2}", table.findings[i]->number);
      for (const Column& column : table.columns)
        text += fmt::format(" {:>7}", cell_of(column.trials[i].verdict));
      text += fmt::format("  {}\n", table.findings[i]->title);
    }
    text += "\nx shown; ! the engine stops; - cannot be built; ? the case fails differently\n";
  }
  return text;
}

// Names columns by version; neighbours become a range: "0.20.2 to 0.22.1", or "0.20.2, 0.25.1".
std::string engines_text(const Table& table, const std::vector<std::size_t>& columns) {
  std::string text;
  for (std::size_t i = 0; i < columns.size();) {
    std::size_t end = i + 1;
    while (end < columns.size() && columns[end] == columns[end - 1] + 1) ++end;
    const auto version = [&](std::size_t at) { return version_of(table.columns[at].engine); };
    text += text.empty() ? "" : ", ";
    text += end - i == 1 ? version(columns[i])
                         : fmt::format("{} to {}", version(columns[i]), version(columns[end - 1]));
    i = end;
  }
  return text;
}

// Returns the reasons for all cells with this verdict, a line per finding and reason. Engines with
// the same reason share a line, so names and versions of engines are removed from it first.
std::string reasons_text(const Table& table, FindingVerdict verdict) {
  std::string text;
  for (std::size_t i = 0; i < table.findings.size(); ++i) {
    std::vector<std::pair<std::string, std::vector<std::size_t>>> said;
    for (std::size_t c = 0; c < table.columns.size(); ++c) {
      const FindingTrial& trial = table.columns[c].trials[i];
      if (trial.verdict != verdict) continue;
      // An engine's message starts with the engine's name.
      std::string what = trial.what;
      const std::string name = table.columns[c].engine + ": ";
      if (what.starts_with(name)) what.erase(0, name.size());
      constexpr std::string_view kThis = "this release";
      const std::string version = version_of(table.columns[c].engine);
      std::size_t at = version.empty() ? std::string::npos : what.find(version);
      for (; at != std::string::npos; at = what.find(version, at + kThis.size()))
        what.replace(at, version.size(), kThis);
      // A failure by another check is named, since its message does not name the finding.
      if (verdict == FindingVerdict::other) what = fmt::format("{}: {}", trial.check, what);
      if (const std::size_t end = what.find('\n'); end != std::string::npos) what.erase(end);
      const auto same = std::ranges::find(said, what, &decltype(said)::value_type::first);
      (same == said.end() ? said.emplace_back(what, std::vector<std::size_t>()) : *same)
          .second.push_back(c);
    }
    for (const auto& [what, columns] : said)
      text += wrapped(fmt::format("- {}: ", table.findings[i]->number),
                      fmt::format("{} ({})", what, engines_text(table, columns)));
  }
  return text;
}

std::string reasons_text(const Table& table) {
  constexpr std::pair<FindingVerdict, std::string_view> kTold[] = {
      {FindingVerdict::stops, "Where the engine stops:"},
      {FindingVerdict::other, "Where the case fails differently:"},
      {FindingVerdict::unbuilt, "What cannot be built:"}};
  std::string text;
  for (const auto& [verdict, head] : kTold)
    if (const std::string lines = reasons_text(table, verdict); !lines.empty())
      text += fmt::format("\n{}\n\n{}", head, lines);
  std::string lines;
  for (const FindingCases* finding : table.findings)
    if (!finding->not_seen.empty())
      lines += fmt::format("- {}: {}\n", finding->number, finding->not_seen);
  if (!lines.empty()) text += fmt::format("\nWhat no decision shows:\n\n{}", lines);
  return text;
}

// The generated part of docs/reference/findings_by_release.md.
std::string markdown_of(const Table& table) {
  // The head of a column is the release's second number, "22" of 0.22.1, so that a row of fourteen
  // columns fits into a line.
  std::string names, head = "| finding |", rule = "|---|";
  for (const Column& column : table.columns) {
    const std::string version = version_of(column.engine);
    names += fmt::format("{}{}", names.empty() ? "" : ", ", version);
    const std::size_t first = version.find('.'), second = version.find('.', first + 1);
    head += fmt::format(" {} |", second == std::string::npos
                                     ? version
                                     : version.substr(first + 1, second - first - 1));
    rule += "---|";
  }
  std::string text = wrapped("Releases: ", names) + "\n" + head + "\n" + rule + "\n";
  for (std::size_t i = 0; i < table.findings.size(); ++i) {
    text += fmt::format("| {} |", table.findings[i]->number);
    for (const Column& column : table.columns)
      text += fmt::format(" {} |", cell_of(column.trials[i].verdict));
    text += "\n";
  }
  return text + reasons_text(table);
}

std::string json_of(const Table& table) {
  using Json = nlohmann::ordered_json;
  Json json = {{"findings", Json::array()}};
  for (std::size_t i = 0; i < table.findings.size(); ++i) {
    const FindingCases& finding = *table.findings[i];
    Json entry = {{"number", finding.number}, {"title", finding.title}, {"engines", Json::array()}};
    if (!finding.not_seen.empty()) entry["not_seen"] = finding.not_seen;
    for (const Column& column : table.columns) {
      const FindingTrial& trial = column.trials[i];
      Json cell = {
          {"engine", column.engine}, {"verdict", name_of(trial.verdict)}, {"case", trial.file}};
      if (!trial.check.empty()) cell["check"] = trial.check;
      if (trial.step >= 0) cell["step"] = trial.step;
      if (!trial.what.empty()) cell["what"] = trial.what;
      entry["engines"].push_back(std::move(cell));
    }
    json["findings"].push_back(std::move(entry));
  }
  return json_text(json);
}

// Appends the columns of a table that --json wrote. Errors: another format, an unknown finding or
// verdict, other findings than the tables before it.
Result<void> merge_table(const std::string& path, Table& table) {
  LS_ASSIGN_OR_RETURN(const std::string text, read_text_file(path, kJsonTextBytesMax));
  JsonReader json(path);
  if (!json.parse(text)) return tl::unexpected(json.error());
  std::vector<const FindingCases*> findings;
  std::vector<Column> columns;
  JsonObject whole = json.root().object();
  for (JsonValue entry : whole.required("findings").array()) {
    JsonObject finding = entry.object();
    JsonValue number = finding.required("number");
    const int asked = number.integer<int>();
    const auto known = std::ranges::find(finding_cases(), asked, &FindingCases::number);
    if (known == finding_cases().end()) {
      number.refuse("a finding of docs/findings.md");
      break;
    }
    // The tables' rows are compared by identity below, so they must be those of this program.
    findings.push_back(&*known);
    finding.optional("title");
    finding.optional("not_seen");
    std::size_t at = 0;
    for (JsonValue value : finding.required("engines").array()) {
      JsonObject cell = value.object();
      if (columns.size() == at) columns.emplace_back();
      Column& column = columns[at++];
      column.engine = cell.required("engine").nonempty_string();
      FindingTrial trial;
      JsonValue verdict = cell.required("verdict");
      const auto known_verdict = from_name<FindingVerdict>(verdict.string());
      if (!known_verdict) verdict.refuse("absent, shows, stops, other or unbuilt");
      trial.verdict = known_verdict.value_or(FindingVerdict::absent);
      trial.file = cell.required("case").string();
      if (auto check = cell.optional("check")) trial.check = check.string();
      if (auto step = cell.optional("step")) trial.step = step.integer();
      if (auto what = cell.optional("what")) trial.what = what.string();
      cell.finish();
      column.trials.push_back(std::move(trial));
    }
    finding.finish();
  }
  whole.finish();
  if (!json.ok()) return tl::unexpected(json.error());
  // Every engine has one cell per finding, in the same order.
  const bool whole_columns = std::ranges::all_of(
      columns, [&](const Column& column) { return column.trials.size() == findings.size(); });
  if (!whole_columns || (!table.columns.empty() && findings != table.findings))
    return fail(path + ": its findings are not those of the other tables");
  table.findings = std::move(findings);
  std::ranges::move(columns, std::back_inserter(table.columns));
  return {};
}

Result<Table> table_of(const FindingsOptions& options) {
  if (options.merge.empty()) return try_all(options);
  Table table;
  for (const std::string& path : options.merge) LS_RETURN_IF_ERROR(merge_table(path, table));
  return table;
}

// Adds an item per finding and engine: skipped if the case cannot be built, failed for every
// verdict except `absent`.
void add_items(const Table& table, const FindingsOptions& options, CommandReport& report) {
  for (const Column& column : table.columns)
    for (std::size_t i = 0; i < table.findings.size(); ++i) {
      const FindingTrial& trial = column.trials[i];
      ReportedItem item{.name = fmt::format("{}: {}. {}", column.engine, table.findings[i]->number,
                                            table.findings[i]->title),
                        .file = trial.file.empty() ? "" : options.folder + "/" + trial.file};
      if (trial.verdict == FindingVerdict::unbuilt) {
        item.kind = ItemKind::skipped;
        item.line = trial.what;
      } else if (trial.verdict != FindingVerdict::absent) {
        item.kind = ItemKind::failed;
        item.check = trial.check;
        item.line = stable_line(trial.check, trial.step, {}, trial.what);
      }
      report.add(std::move(item));
    }
}

Result<int> run_findings(const FindingsOptions& options, CommandReport& report) {
  watch_stop_signals();
  LS_ASSIGN_OR_RETURN(const auto findings, chosen_findings(options.numbers));
  if (options.engines.empty() && options.merge.empty()) {
    nlohmann::ordered_json json = {{"findings", nlohmann::ordered_json::array()}};
    for (const FindingCases* finding : findings) {
      fmt::print("{:>2}  {}\n      {}\n", finding->number, finding->title,
                 fmt::join(finding->files, "\n      "));
      json["findings"].push_back(
          {{"number", finding->number}, {"title", finding->title}, {"cases", finding->files}});
    }
    if (report.wants_json()) report.set_json(json_text(json));
    return kExitAgreed;
  }
  if (!std::filesystem::is_directory(options.folder))
    return fail("--cases {}: no such folder; the cases are in tests/regressions of the source tree",
                options.folder);
  LS_ASSIGN_OR_RETURN(const auto table, table_of(options));
  fmt::print("{}", options.as_markdown ? markdown_of(table) : text_of(table) + reasons_text(table));
  if (report.wants_json()) report.set_json(json_of(table));
  add_items(table, options, report);
  // Exit status 1 if any finding shows, or a case fails in another way.
  const auto items = report.items();
  if (std::ranges::find(items, ItemKind::failed, &ReportedItem::kind) != items.end())
    return kExitDisagreed;
  // A run in which no case could be built has no verdict.
  if (!items.empty() && !stop_requested() &&
      std::ranges::find(items, ItemKind::passed, &ReportedItem::kind) == items.end())
    return refuse("no finding was tried: " + items.front().line);
  return kExitAgreed;
}

}  // namespace

void add_findings_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<FindingsOptions>();
  CLI::App* command = app.add_subcommand(
      "findings", "Test your engines for the known findings of docs/findings.md");
  command->add_option("N", options->numbers, "numbers of findings (all)");
  command
      ->add_option("--engine", options->engines,
                   "vllm[:DIR], sglang[:DIR], or a command that speaks docs/protocols.md; several "
                   "engines: a table. Without this option the cases are listed")
      ->type_name("ENGINE");
  declare_engine_python(*command);
  declare_decisions_timeout(*command, options->timeout_s);
  command
      ->add_option("--cases", options->folder,
                   "folder of the cases (tests/regressions of the source tree)")
      ->needs("--engine");
  command->add_flag("--markdown", options->as_markdown,
                    "the table in the form of docs/reference/findings_by_release.md");
  declare_output_folder(*command, "--save", options->save_dir,
                        "folder for recordings of each engine's decisions");
  declare_reports(*command, options->reports, "the table as JSON");
  command->add_option("--merge", options->merge, "merge tables that --json wrote; run nothing")
      ->excludes("--engine")
      ->excludes("--engine-python")
      ->excludes("--decisions-timeout")
      ->excludes("--save")
      ->excludes("N");
  run_when_chosen(*command, options, exit_code, run_findings);
}

}  // namespace lockstep
